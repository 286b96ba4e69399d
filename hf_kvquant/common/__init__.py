"""What every room may use: exceptions, names, files, progress, tables, Ctrl-C. Imports no other room."""
