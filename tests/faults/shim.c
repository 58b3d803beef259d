// Preloaded before libc: calls about files below a folder are counted, written down, and made to
// fail at will. See shim.py for what it is asked by.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILL, FAIL_EIO, FAIL_ENOSPC, CUT, CUT_KILL, FULL };
#define MOST 4096
#define PAGE 4096

static char root[PATH_MAX];
static size_t root_len;
static int tracing = -1;   // descriptor that the trace goes to; -1: none
static long counted, fault_at = -1;
static int fault_action;
static long full_for = 40;  // calls that a full disk stays full
static uint64_t next_id = 1;
static struct { char *path; uint64_t id; int append; } fds[MOST];
static struct { char *at, *shadow; size_t len; uint64_t id; } maps[MOST];
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name) ((typeof(&name))real_(#name))
static void *real_(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

static void put(const void *data, size_t len) {
    const char *at = data;
    while (len) {
        long n = syscall(SYS_write, tracing, at, len);
        if (n <= 0) abort();
        at += n; len -= n;
    }
}

static void record(char op, const char *a, const void *b, size_t blen, uint64_t x, uint64_t y) {
    if (tracing < 0) return;
    uint32_t lens[2] = {a ? (uint32_t)strlen(a) : 0, (uint32_t)blen};
    uint64_t numbers[2] = {x, y};
    put(&op, 1); put(lens, 8); put(numbers, 16);
    if (lens[0]) put(a, lens[0]);
    if (blen) put(b, blen);
}

static int below(const char *path) {
    return root_len && !strncmp(path, root, root_len) && (path[root_len] == '/' || !path[root_len]);
}

// The absolute path, if it lies below the root; else NULL. Freed by the caller.
static char *place(int dir, const char *path) {
    if (!root_len || !path) return NULL;
    char full[2 * PATH_MAX];
    if (path[0] == '/') snprintf(full, sizeof full, "%s", path);
    else if (dir >= 0 && dir < MOST && fds[dir].path)
        snprintf(full, sizeof full, "%s/%s", fds[dir].path, path);
    else if (dir == AT_FDCWD) {
        char cwd[PATH_MAX];
        if (!getcwd(cwd, sizeof cwd)) return NULL;
        snprintf(full, sizeof full, "%s/%s", cwd, path);
    } else return NULL;
    size_t n = strlen(full);
    while (n > 1 && full[n - 1] == '/') full[--n] = 0;
    return below(full) ? strdup(full) : NULL;
}

static int ours(int fd) { return fd >= 0 && fd < MOST && fds[fd].path != NULL; }

// Pages of maps that were written to since the last look.
static void look_at_maps(void) {
    if (tracing < 0) return;
    for (int i = 0; i < MOST; i++) {
        if (!maps[i].at) continue;
        for (size_t off = 0; off < maps[i].len; off += PAGE) {
            size_t n = maps[i].len - off < PAGE ? maps[i].len - off : PAGE;
            if (memcmp(maps[i].at + off, maps[i].shadow + off, n)) {
                memcpy(maps[i].shadow + off, maps[i].at + off, n);
                record('W', NULL, maps[i].shadow + off, n, maps[i].id, off);
            }
        }
    }
}

// What is to be done at this call: the action, or NONE.
static int now(int takes_space) {
    long n = counted++;
    if (fault_at < 0 || n < fault_at) return NONE;
    if (fault_action == FULL) return n < fault_at + full_for && takes_space ? FAIL_ENOSPC : NONE;
    if (n > fault_at) return NONE;
    if (fault_action == KILL) kill(getpid(), SIGKILL);
    return fault_action;
}

static int failed(int action) {  // whether the call fails, with errno set
    if (action == FAIL_EIO) { errno = EIO; return 1; }
    if (action == FAIL_ENOSPC) { errno = ENOSPC; return 1; }
    return 0;
}

#define LOCKED pthread_mutex_lock(&mutex)
#define FREE pthread_mutex_unlock(&mutex)

// ---------------------------------------------------------------------------- what Python calls

void fault_root(const char *path) {
    LOCKED;
    snprintf(root, sizeof root, "%s", path);
    root_len = strlen(root);
    FREE;
}
void fault_set(long at, int action) { counted = 0; fault_at = at; fault_action = action; }
void fault_trace(int fd) { tracing = fd; }
long fault_count(void) { return counted; }
void fault_mark(const char *text) { LOCKED; look_at_maps(); record('L', text, NULL, 0, 0, 0); FREE; }

// ------------------------------------------------------------------------------------------ calls

static int opened(int dir, const char *path, int flags, mode_t mode, int at_call) {
    int (*real_openat)(int, const char *, int, ...) = (void *)real_("openat");
    (void)at_call;
    LOCKED;
    char *full = place(dir, path);
    if (!full) { FREE; return real_openat(dir, path, flags, mode); }
    look_at_maps();
    if (failed(now((flags & O_CREAT) != 0))) { free(full); FREE; return -1; }
    int fd = real_openat(dir, path, flags, mode);
    if (fd < 0 || fd >= MOST) { int e = errno; free(full); FREE; errno = e; return fd; }
    free(fds[fd].path);
    fds[fd].path = full; fds[fd].id = next_id++; fds[fd].append = (flags & O_APPEND) != 0;
    record('O', full, NULL, 0, fds[fd].id,
           ((flags & O_CREAT) ? 1 : 0) | ((flags & O_TRUNC) ? 2 : 0));
    FREE;
    return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, 0); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, 0); }
int openat(int d, const char *path, int flags, ...) { MODE return opened(d, path, flags, mode, 1); }
int openat64(int d, const char *path, int flags, ...) { MODE return opened(d, path, flags, mode, 1); }

int close(int fd) {
    LOCKED;
    int is_ours = ours(fd), action = NONE;
    if (is_ours) {
        look_at_maps();
        action = now(0);
        free(fds[fd].path);
        fds[fd].path = NULL;
    }
    FREE;
    int done = REAL(close)(fd);
    if (is_ours && action == FAIL_EIO) { errno = EIO; return -1; }
    return done;
}

static off_t place_of(int fd, off_t offset) {
    if (offset >= 0) return offset;
    if (fds[fd].append) { struct stat s; fstat(fd, &s); return s.st_size; }
    return lseek(fd, 0, SEEK_CUR);
}

static ssize_t written(int fd, const void *data, size_t n, off_t offset) {
    ssize_t (*real_write)(int, const void *, size_t) = (void *)real_("write");
    ssize_t (*real_pwrite)(int, const void *, size_t, off_t) = (void *)real_("pwrite64");
    LOCKED;
    if (!ours(fd)) {
        FREE;
        return offset < 0 ? real_write(fd, data, n) : real_pwrite(fd, data, n, offset);
    }
    look_at_maps();
    int action = now(1);
    if (failed(action)) { FREE; return -1; }
    if (action == CUT || action == CUT_KILL) n = n > 1 ? n / 2 : n;
    off_t begin = place_of(fd, offset);
    ssize_t done = offset < 0 ? real_write(fd, data, n) : real_pwrite(fd, data, n, offset);
    if (action == CUT_KILL) kill(getpid(), SIGKILL);
    if (done > 0) record('W', NULL, data, done, fds[fd].id, begin);
    FREE;
    return done;
}
ssize_t write(int fd, const void *data, size_t n) { return written(fd, data, n, -1); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return written(fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) { return written(fd, data, n, at); }
ssize_t writev(int fd, const struct iovec *parts, int num) {
    if (!ours(fd)) return REAL(writev)(fd, parts, num);
    ssize_t total = 0;
    for (int i = 0; i < num; i++) {  // a short one ends it, as with the system's own
        ssize_t done = written(fd, parts[i].iov_base, parts[i].iov_len, -1);
        if (done < 0) return total ? total : -1;
        total += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return total;
}

#define ON_FD(space, letter, x, call) \
    LOCKED; \
    if (!ours(fd)) { FREE; return call; } \
    look_at_maps(); \
    if (failed(now(space))) { FREE; return -1; } \
    int done = call; \
    if (!done) record(letter, NULL, NULL, 0, fds[fd].id, x); \
    FREE; \
    return done;
int fsync(int fd) { ON_FD(0, 'S', 0, REAL(fsync)(fd)) }
int fdatasync(int fd) { ON_FD(0, 'S', 0, REAL(fdatasync)(fd)) }
int ftruncate(int fd, off_t n) { ON_FD(0, 'T', n, REAL(ftruncate)(fd, n)) }
int ftruncate64(int fd, off_t n) { ON_FD(0, 'T', n, REAL(ftruncate)(fd, n)) }

static int allocated(int fd, off_t at, off_t n) {
    int (*real)(int, off_t, off_t) = (void *)real_("posix_fallocate64");
    LOCKED;
    if (!ours(fd)) { FREE; return real(fd, at, n); }
    look_at_maps();
    if (failed(now(1))) { int e = errno; FREE; return e; }
    int done = real(fd, at, n);
    if (!done) record('A', NULL, NULL, 0, fds[fd].id, at + n);
    FREE;
    return done;
}
int posix_fallocate(int fd, off_t at, off_t n) { return allocated(fd, at, n); }
int posix_fallocate64(int fd, off_t at, off_t n) { return allocated(fd, at, n); }

#define ON_PATH(dir, path, space, letter, call) \
    LOCKED; \
    char *full = place(dir, path); \
    if (!full) { FREE; return call; } \
    look_at_maps(); \
    if (failed(now(space))) { free(full); FREE; return -1; } \
    int done = call, e = errno; \
    if (!done) record(letter, full, NULL, 0, 0, 0); \
    free(full); \
    FREE; \
    errno = e; \
    return done;
int unlink(const char *path) { ON_PATH(AT_FDCWD, path, 0, 'U', REAL(unlink)(path)) }
int rmdir(const char *path) { ON_PATH(AT_FDCWD, path, 0, 'U', REAL(rmdir)(path)) }
int unlinkat(int d, const char *path, int f) { ON_PATH(d, path, 0, 'U', REAL(unlinkat)(d, path, f)) }
int mkdir(const char *path, mode_t m) { ON_PATH(AT_FDCWD, path, 1, 'M', REAL(mkdir)(path, m)) }
int mkdirat(int d, const char *path, mode_t m) {
    ON_PATH(d, path, 1, 'M', REAL(mkdirat)(d, path, m))
}

static int renamed(int from, const char *a, int to, const char *b) {
    LOCKED;
    char *old = place(from, a), *new = place(to, b);
    int is_ours = old != NULL || new != NULL;
    if (is_ours) look_at_maps();
    if (is_ours && failed(now(0))) { free(old); free(new); FREE; return -1; }
    int done = REAL(renameat)(from, a, to, b), e = errno;
    if (!done && old && new) record('R', old, new, strlen(new), 0, 0);
    free(old); free(new);
    FREE;
    errno = e;
    return done;
}
int rename(const char *a, const char *b) { return renamed(AT_FDCWD, a, AT_FDCWD, b); }
int renameat(int d, const char *a, int f, const char *b) { return renamed(d, a, f, b); }

static void *mapped(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    void *(*real)(void *, size_t, int, int, int, off_t) = (void *)real_("mmap64");
    void *found = real(at, n, prot, flags, fd, offset);
    if (!ours(fd) || !(flags & MAP_SHARED) || !(prot & PROT_WRITE) || tracing < 0) return found;
    if (found == MAP_FAILED || offset) return found;
    LOCKED;
    for (int i = 0; i < MOST; i++)
        if (!maps[i].at) {
            maps[i].at = found; maps[i].len = n; maps[i].id = fds[fd].id;
            maps[i].shadow = malloc(n);
            memcpy(maps[i].shadow, found, n);
            break;
        }
    FREE;
    return found;
}
void *mmap(void *at, size_t n, int p, int f, int fd, off_t o) { return mapped(at, n, p, f, fd, o); }
void *mmap64(void *at, size_t n, int p, int f, int fd, off_t o) { return mapped(at, n, p, f, fd, o); }

int munmap(void *at, size_t n) {
    LOCKED;
    for (int i = 0; i < MOST; i++)
        if (maps[i].at && maps[i].at == at) {
            look_at_maps();
            free(maps[i].shadow);
            maps[i].at = NULL;
        }
    FREE;
    return REAL(munmap)(at, n);
}

int msync(void *at, size_t n, int flags) {
    LOCKED;
    for (int i = 0; i < MOST; i++)
        if (maps[i].at && (char *)at >= maps[i].at && (char *)at < maps[i].at + maps[i].len) {
            look_at_maps();
            if (failed(now(0))) { FREE; return -1; }
            int done = REAL(msync)(at, n, flags);
            if (!done && flags & MS_SYNC) record('S', NULL, NULL, 0, maps[i].id, 0);
            FREE;
            return done;
        }
    FREE;
    return REAL(msync)(at, n, flags);
}
