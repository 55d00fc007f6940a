// Replaces the file that CMake generates, with the texts of the library's version.
#define JVERSION "6b  27-Mar-1998"
#define JCOPYRIGHT "Copyright (C) 1991-2020 Thomas G. Lane, Guido Vollbeding, and others"
#define JCOPYRIGHT_SHORT "Copyright (C) 1991-2023 The libjpeg-turbo Project and many others"
