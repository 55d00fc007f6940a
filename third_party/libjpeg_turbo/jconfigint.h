// Replaces the file that CMake generates, for gcc and clang.
#define BUILD ""
#undef inline
#define INLINE inline __attribute__((always_inline))
#define THREAD_LOCAL __thread
#define PACKAGE_NAME "libjpeg-turbo"
#define VERSION "2.1.5"
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define HAVE_BUILTIN_CTZL 1
#define FALLTHROUGH __attribute__((fallthrough));
