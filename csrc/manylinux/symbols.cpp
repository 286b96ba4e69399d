// Symbols that the headers of the build machine's gcc and glibc use and the libraries of manylinux_2_28 lack. Linked
// only with HF_KVQUANT_MANYLINUX. A newer compiler may need more of them: the linker or auditwheel then names them.

#include <sstream>

// Since glibc 2.32. While this is set, std::shared_ptr counts without atomic instructions; here it never is.
extern "C" {
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}

// Since GLIBCXX_3.4.26 in libstdc++; manylinux_2_28 has 3.4.24.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
