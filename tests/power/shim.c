/* Writes down what a program does to the files of one directory, so that a power cut can be played later.
 *
 * Preloaded into a program (LD_PRELOAD). Nothing is held back: the files are as the program made them. The log tells
 * disk.py in which order pages were written and which syncs covered them, and from that it makes what a disk would
 * hold after a cut. Changes are logged before they are made and syncs when they have succeeded: of a program that was
 * killed in between, the log has one change more than the files, or one sync less.
 *
 *     POWER_DIR     the directory, as the program spells it (absolute)
 *     POWER_LOG     the log: records of `struct record`, each followed by `length` bytes
 *     POWER_FAIL    optional, SUFFIX:FIRST:COUNT: so many syncs of files with that suffix fail with EIO;
 *                   ~SUFFIX: only through descriptors that have written nothing (SQLite copies a log through one)
 *     POWER_ARM     optional: they are counted from when this file is there
 *     POWER_SLOW    optional: so many milliseconds more for each sync
 *     POWER_END     optional: the program is killed when the log has so many records
 *     POWER_BOOT    optional: the file that is read in place of the kernel's boot id
 *
 * One mutex makes the log's order that of the calls. What a program may do to a file that is not modelled here
 * (mappings, copies inside the kernel) is logged as such, and disk.py refuses to go on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define DESCRIPTORS 65536
#define BOOT_ID "/proc/sys/kernel/random/boot_id"

enum kind {
    OPENED = 'O',  /* handle, payload: path, offset: 1 it was created, 2 it was emptied */
    WRITTEN = 'W', /* handle, offset, payload: the bytes */
    RESIZED = 'T', /* handle, offset: the new size */
    SYNCING = 'B', /* handle; a sync begins: it covers what was written before */
    SYNCED = 'S',  /* handle; the sync that this thread has begun, offset: its record's number */
    FAILED = 'F',  /* handle; the same, and the call got EIO */
    RENAMED = 'R', /* payload: old path, a zero byte, new path */
    REMOVED = 'U', /* payload: path */
    UNKNOWN = 'X', /* payload: what was called */
};

struct record {
    uint32_t kind;
    uint32_t handle;
    uint64_t offset;
    uint64_t length;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static char directory[4096];
static size_t directory_length;
static char boot_id[4096];
static char arm[4096];
static char fail_suffix[64];
static long fail_first, fail_count;
static long matching_syncs;
static useconds_t slow_us;
static uint32_t handles[DESCRIPTORS]; /* by descriptor; 0: not ours */
static char writes[DESCRIPTORS];      /* by descriptor: whether something was written through it */
static char fails[DESCRIPTORS];       /* by descriptor: whether POWER_FAIL is about it */
static uint32_t last_handle;
static uint64_t records;
static uint64_t end = UINT64_MAX;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

__attribute__((constructor)) static void begin(void)
{
    const char *where = getenv("POWER_DIR"), *log = getenv("POWER_LOG");
    const char *fail = getenv("POWER_FAIL"), *boot = getenv("POWER_BOOT"), *when = getenv("POWER_ARM");
    if (!where || !log) return;
    directory_length = strlen(where);
    if (directory_length >= sizeof directory) abort();
    strcpy(directory, where);
    if (boot && strlen(boot) < sizeof boot_id) strcpy(boot_id, boot);
    if (when && strlen(when) < sizeof arm) strcpy(arm, when);
    if (getenv("POWER_SLOW")) slow_us = (useconds_t)atol(getenv("POWER_SLOW")) * 1000;
    if (getenv("POWER_END")) end = strtoull(getenv("POWER_END"), NULL, 10);
    if (fail && sscanf(fail, "%63[^:]:%ld:%ld", fail_suffix, &fail_first, &fail_count) != 3) abort();
    log_fd = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0) abort();
    unsetenv("POWER_LOG"); /* programs that this one starts have an order of their own */
}

/* ---- the log; all with the mutex held */

static uint64_t note(enum kind kind, uint32_t handle, uint64_t offset, const struct iovec *data, int count)
{
    struct record record = {kind, handle, offset, 0};
    struct iovec all[16];
    if (count > 15) abort();
    all[0] = (struct iovec){&record, sizeof record};
    size_t total = sizeof record;
    if (records >= end) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    for (int i = 0; i < count; i++) {
        all[i + 1] = data[i];
        record.length += data[i].iov_len;
        total += data[i].iov_len;
    }
    if (REAL(writev)(log_fd, all, count + 1) != (ssize_t)total) abort(); /* a log with a hole is worse than none */
    return records++;
}

static uint64_t note_text(enum kind kind, uint32_t handle, uint64_t offset, const char *text)
{
    struct iovec data = {(void *)text, strlen(text)};
    return note(kind, handle, offset, &data, 1);
}

static int ends_with(const char *text, const char *suffix)
{
    size_t length = strlen(text), tail = strlen(suffix);
    return length >= tail && !strcmp(text + length - tail, suffix);
}

/* The index of SQLite's log is rebuilt after a cut; sockets and the program's own log are no state. */
static int is_ours(const char *path)
{
    if (log_fd < 0 || !path || strncmp(path, directory, directory_length)) return 0;
    if (path[directory_length] && path[directory_length] != '/') return 0;
    return !ends_with(path, "-shm") && !ends_with(path, ".log") && !ends_with(path, ".sock");
}

static uint32_t handle_of(int fd)
{
    return fd >= 0 && fd < DESCRIPTORS ? handles[fd] : 0;
}

/* ---- names */

static int open_noted(int (*opener)(int, const char *, int, ...), int at, const char *path, int flags, mode_t mode)
{
    if (log_fd >= 0 && path && boot_id[0] && !strcmp(path, BOOT_ID)) return opener(AT_FDCWD, boot_id, flags, mode);
    if (!is_ours(path)) return opener(at, path, flags, mode);
    pthread_mutex_lock(&mutex);
    struct stat found;
    int was_there = !stat(path, &found);
    int changes = was_there ? flags & O_TRUNC : flags & O_CREAT;
    uint32_t handle = ++last_handle;
    if (changes) note_text(OPENED, handle, was_there ? 2 : 1, path);
    int fd = opener(at, path, flags, mode);
    int error = errno;
    if (fd >= DESCRIPTORS) abort();
    if (fd >= 0) {
        handles[fd] = handle;
        fails[fd] = fail_count > 0 && ends_with(path, fail_suffix + (fail_suffix[0] == '~'));
        writes[fd] = 0;
        if (!changes) note_text(OPENED, handle, 0, path);
    } else if (changes) {
        note_text(UNKNOWN, handle, 0, "an open that failed");
    }
    pthread_mutex_unlock(&mutex);
    errno = error;
    return fd;
}

#define MODE(flags)                                          \
    mode_t mode = 0;                                         \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                   \
        va_list more;                                        \
        va_start(more, flags);                               \
        mode = (mode_t)va_arg(more, int);                    \
        va_end(more);                                        \
    }

int open(const char *path, int flags, ...)
{
    MODE(flags)
    return open_noted(REAL(openat), AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE(flags)
    return open_noted(REAL(openat64), AT_FDCWD, path, flags, mode);
}

int openat(int at, const char *path, int flags, ...)
{
    MODE(flags)
    return open_noted(REAL(openat), at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...)
{
    MODE(flags)
    return open_noted(REAL(openat64), at, path, flags, mode);
}

int close(int fd)
{
    if (handle_of(fd)) { /* before the call: in the next moment the number may be another thread's */
        pthread_mutex_lock(&mutex);
        handles[fd] = 0;
        pthread_mutex_unlock(&mutex);
    }
    return REAL(close)(fd);
}

static void note_rename(const char *old, const char *new)
{
    struct iovec data[3] = {{(void *)old, strlen(old)}, {"", 1}, {(void *)new, strlen(new)}};
    note(RENAMED, 0, 0, data, 3);
}

static int is_there(int at, const char *path)
{
    struct stat found;
    return !fstatat(at, path, &found, AT_SYMLINK_NOFOLLOW);
}

#define NOTED(is_noted, note, call)                          \
    pthread_mutex_lock(&mutex);                              \
    int noted = (is_noted) ? (note, 1) : 0;                  \
    int result = call;                                       \
    int error = errno;                                       \
    if (noted && result) note_text(UNKNOWN, 0, 0, #call);    \
    pthread_mutex_unlock(&mutex);                            \
    errno = error;                                           \
    return result;

int rename(const char *old, const char *new)
{
    NOTED(
        (is_ours(old) || is_ours(new)) && is_there(AT_FDCWD, old), note_rename(old, new), REAL(rename)(old, new)
    )
}

int renameat(int old_at, const char *old, int new_at, const char *new)
{
    NOTED(
        (is_ours(old) || is_ours(new)) && is_there(old_at, old), note_rename(old, new),
        REAL(renameat)(old_at, old, new_at, new)
    )
}

int unlink(const char *path)
{
    NOTED(is_ours(path) && is_there(AT_FDCWD, path), note_text(REMOVED, 0, 0, path), REAL(unlink)(path))
}

int unlinkat(int at, const char *path, int flags)
{
    NOTED(
        is_ours(path) && !(flags & AT_REMOVEDIR) && is_there(at, path), note_text(REMOVED, 0, 0, path),
        REAL(unlinkat)(at, path, flags)
    )
}

int link(const char *old, const char *new)
{
    NOTED(is_ours(new), note_text(UNKNOWN, 0, 0, "link"), REAL(link)(old, new))
}

int truncate(const char *path, off_t size)
{
    NOTED(is_ours(path), note_text(UNKNOWN, 0, 0, "truncate"), REAL(truncate)(path, size))
}

/* ---- contents */

static ssize_t write_noted(int fd, const struct iovec *data, int count, off_t offset, int is_at)
{
    pthread_mutex_lock(&mutex);
    uint32_t handle = handle_of(fd);
    if (handle) {
        off_t place = offset;
        if (!is_at) place = lseek(fd, 0, REAL(fcntl)(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
        writes[fd] = 1;
        note(WRITTEN, handle, (uint64_t)place, data, count);
    }
    ssize_t result = is_at ? REAL(pwritev)(fd, data, count, offset) : REAL(writev)(fd, data, count);
    int error = errno;
    if (handle) {
        ssize_t wanted = 0;
        for (int i = 0; i < count; i++) wanted += (ssize_t)data[i].iov_len;
        if (result != wanted) note_text(UNKNOWN, handle, 0, "a write that was cut short");
    }
    pthread_mutex_unlock(&mutex);
    errno = error;
    return result;
}

ssize_t write(int fd, const void *bytes, size_t length)
{
    if (!handle_of(fd)) return REAL(write)(fd, bytes, length);
    struct iovec data = {(void *)bytes, length};
    return write_noted(fd, &data, 1, 0, 0);
}

ssize_t writev(int fd, const struct iovec *data, int count)
{
    if (!handle_of(fd)) return REAL(writev)(fd, data, count);
    return write_noted(fd, data, count, 0, 0);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    if (!handle_of(fd)) return REAL(pwrite)(fd, bytes, length, offset);
    struct iovec data = {(void *)bytes, length};
    return write_noted(fd, &data, 1, offset, 1);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset)
{
    return pwrite(fd, bytes, length, offset);
}

ssize_t pwritev(int fd, const struct iovec *data, int count, off_t offset)
{
    if (!handle_of(fd)) return REAL(pwritev)(fd, data, count, offset);
    return write_noted(fd, data, count, offset, 1);
}

ssize_t pwritev64(int fd, const struct iovec *data, int count, off64_t offset)
{
    return pwritev(fd, data, count, offset);
}

int ftruncate(int fd, off_t size)
{
    NOTED(handle_of(fd), note(RESIZED, handle_of(fd), (uint64_t)size, NULL, 0), REAL(ftruncate)(fd, size))
}

int ftruncate64(int fd, off64_t size)
{
    return ftruncate(fd, size);
}

static int is_to_fail(int fd)
{
    if (!fails[fd] || (fail_suffix[0] == '~' && writes[fd]) || (arm[0] && access(arm, F_OK))) return 0;
    long number = ++matching_syncs;
    return number >= fail_first && number < fail_first + fail_count;
}

/* A sync that fails is not made: what it was for stays where only the program sees it. */
static int sync_noted(int fd, int (*sync)(int))
{
    pthread_mutex_lock(&mutex);
    uint32_t handle = handle_of(fd);
    if (!handle) {
        pthread_mutex_unlock(&mutex);
        return sync(fd);
    }
    uint64_t begun = note(SYNCING, handle, 0, NULL, 0);
    int fail = is_to_fail(fd);
    pthread_mutex_unlock(&mutex);
    if (slow_us) usleep(slow_us);
    int result = fail ? -1 : sync(fd);
    int error = fail ? EIO : errno;
    pthread_mutex_lock(&mutex);
    note(result ? FAILED : SYNCED, handle, begun, NULL, 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return result;
}

int fsync(int fd)
{
    return sync_noted(fd, REAL(fsync));
}

int fdatasync(int fd)
{
    return sync_noted(fd, REAL(fdatasync));
}

/* ---- what is not modelled */

static void refuse(int fd, const char *what)
{
    pthread_mutex_lock(&mutex);
    if (handle_of(fd)) note_text(UNKNOWN, handle_of(fd), 0, what);
    pthread_mutex_unlock(&mutex);
}

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    if ((protection & PROT_WRITE) && (flags & MAP_SHARED)) refuse(fd, "mmap");
    return REAL(mmap)(address, length, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    return mmap(address, length, protection, flags, fd, offset);
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    refuse(fd, "fallocate");
    return REAL(fallocate)(fd, mode, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    refuse(fd, "posix_fallocate");
    return REAL(posix_fallocate)(fd, offset, length);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length)
{
    return fallocate(fd, mode, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    return posix_fallocate(fd, offset, length);
}

ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t length, unsigned flags)
{
    refuse(out, "copy_file_range");
    return REAL(copy_file_range)(in, in_offset, out, out_offset, length, flags);
}

ssize_t sendfile(int out, int in, off_t *offset, size_t count);
ssize_t sendfile(int out, int in, off_t *offset, size_t count)
{
    refuse(out, "sendfile");
    return REAL(sendfile)(out, in, offset, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count);
ssize_t sendfile64(int out, int in, off64_t *offset, size_t count)
{
    return sendfile(out, in, offset, count);
}
