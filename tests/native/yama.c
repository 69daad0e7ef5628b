// Loaded before the C library, this is Yama at the scope of $YAMA_SCOPE, as security/yama/yama_lsm.c has it: reads of
// another process's memory by none but its ancestors, and those that descend from the process that it has declared.
// Declarations are files of $YAMA_FOLDER.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

static FILE *open_real(const char *name, const char *path, const char *mode) {
  FILE *(*const real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, name);
  return real(path, mode);
}

static FILE *open_any(const char *name, const char *path, const char *mode) {
  if (strcmp(path, "/proc/sys/kernel/yama/ptrace_scope") != 0) return open_real(name, path, mode);
  char file[4096];
  snprintf(file, sizeof file, "%s/scope", getenv("YAMA_FOLDER"));
  return open_real(name, file, mode);
}

FILE *fopen(const char *path, const char *mode) { return open_any("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return open_any("fopen64", path, mode); }

static int parent_of(int process) {
  char file[64];
  snprintf(file, sizeof file, "/proc/%d/stat", process);
  FILE *const stat = open_real("fopen", file, "r");
  int parent = 0;
  if (stat != NULL && fscanf(stat, "%*d (%*[^)]) %*c %d", &parent) != 1) parent = 0;
  if (stat != NULL) fclose(stat);
  return parent;
}

static int descends(int process, int from) {
  for (; process > 0; process = parent_of(process)) {
    if (process == from) return 1;
  }
  return 0;
}

static int declared_by(int process) {
  char file[4096];
  snprintf(file, sizeof file, "%s/%d", getenv("YAMA_FOLDER"), process);
  FILE *const declaration = open_real("fopen", file, "r");
  int declared = 0;
  if (declaration != NULL && fscanf(declaration, "%d", &declared) != 1) declared = 0;
  if (declaration != NULL) fclose(declaration);
  return declared;
}

int prctl(int option, ...) {
  va_list arguments;
  va_start(arguments, option);
  unsigned long values[4];
  for (int i = 0; i < 4; ++i) values[i] = va_arg(arguments, unsigned long);
  va_end(arguments);
  if (option != PR_SET_PTRACER) {
    int (*const real)(int, unsigned long, unsigned long, unsigned long, unsigned long) =
        (int (*)(int, unsigned long, unsigned long, unsigned long, unsigned long))dlsym(RTLD_NEXT, "prctl");
    return real(option, values[0], values[1], values[2], values[3]);
  }
  char file[4096];
  snprintf(file, sizeof file, "%s/%d", getenv("YAMA_FOLDER"), getpid());
  FILE *const declaration = open_real("fopen", file, "w");
  fprintf(declaration, "%lu", values[0]);
  fclose(declaration);
  return 0;
}

ssize_t process_vm_readv(pid_t process, const struct iovec *local, unsigned long locals, const struct iovec *remote,
                         unsigned long remotes, unsigned long flags) {
  const int scope = atoi(getenv("YAMA_SCOPE")), declared = declared_by(process);
  const int related = descends(process, getpid()) || (declared != 0 && descends(getpid(), declared));
  if (scope > 1 || (scope == 1 && !related)) {
    errno = EPERM;
    return -1;
  }
  ssize_t (*const real)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long) =
      (ssize_t(*)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long))dlsym(
          RTLD_NEXT, "process_vm_readv");
  return real(process, local, locals, remote, remotes, flags);
}
