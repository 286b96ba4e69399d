// What the headers of this machine's gcc and glibc refer to, and the libraries of manylinux_2_28 do not have. Linked only
// with HF_KVQUANT_MANYLINUX. A newer compiler may need more here: the linker or auditwheel then names it.

#include <sstream>

// Introduced in glibc 2.32. std::shared_ptr counts without atomic instructions while this is set; it never is here.
extern "C" {
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}

// In libstdc++ from GLIBCXX_3.4.26 on; manylinux_2_28 has 3.4.24.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
