/* Checks of a C interface, for programs in C. Define LAST_ERROR as the interface's last_error function first. */
#ifndef LOCKSTEP_TESTS_SUPPORT_C_CHECK_H
#define LOCKSTEP_TESTS_SUPPORT_C_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program, with the place and what the library says. */
#define CHECK(condition)                                                                                     \
  do {                                                                                                       \
    if (!(condition)) {                                                                                      \
      fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, LAST_ERROR()); \
      _Exit(3);                                                                                              \
    }                                                                                                        \
  } while (0)
#define OK(call) CHECK((call) == LOCKSTEP_OK)
/* The call is refused with this status, and the text has these words. */
#define REFUSED(status, words, call)              \
  do {                                            \
    CHECK((call) == (status));                    \
    CHECK(strstr(LAST_ERROR(), (words)) != NULL); \
  } while (0)

#endif
