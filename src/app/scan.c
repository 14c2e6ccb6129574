/* Looking at files: see scan.h. */
#include "app/scan.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/digest.h"

#define TREE_MOST 20000 /* entries of the tree */
#define DEPTH_MOST 32   /* folders within folders, links to links */
#define READ_SIZE 65536

/* ---- lists --------------------------------------------------------------------------------- */

/* True: it is a new one. */
static bool add_folder(struct mill_scan *scan, const char *path, bool tree)
{
	for (size_t i = 0; i < scan->folder_count; i++)
		if (strcmp(scan->folders[i].path, path) == 0) {
			scan->folders[i].tree |= tree;
			return false;
		}
	scan->folders =
	        mill_realloc(scan->folders, (scan->folder_count + 1) * sizeof(scan->folders[0]));
	scan->folders[scan->folder_count++] =
	        (struct mill_scan_folder){ .path = mill_strdup(path), .tree = tree };
	return true;
}

static void add_point(struct mill_scan *scan, const char *path)
{
	if (scan->point_count % 64 == 0)
		scan->points = mill_realloc(scan->points,
		                            (scan->point_count + 64) * sizeof(scan->points[0]));
	scan->points[scan->point_count++] = mill_strdup(path);
}

static void add_file(struct mill_scan *scan, const char *path)
{
	scan->files = mill_realloc(scan->files, (scan->file_count + 1) * sizeof(scan->files[0]));
	scan->files[scan->file_count++] =
	        (struct mill_scan_file){ .path = mill_strdup(path), .in_tree = true };
}

static int compare_files(const void *a, const void *b)
{
	const struct mill_scan_file *left = a, *right = b;
	return strcmp(left->path, right->path);
}

/* Among the first `known`, which are in order; or NULL. */
static struct mill_scan_file *find_known(const struct mill_scan *scan, size_t known,
                                         const char *path)
{
	const struct mill_scan_file wanted = { .path = (char *)path };
	return known > 0 ? bsearch(&wanted, scan->files, known, sizeof(wanted), compare_files)
	                 : NULL;
}

static void add_tree_file(struct mill_scan *scan, size_t known, const char *path)
{
	struct mill_scan_file *file = find_known(scan, known, path);
	if (file != NULL)
		file->in_tree = true;
	else
		add_file(scan, path);
}

/* ---- paths --------------------------------------------------------------------------------- */

/* What stands before the last slash: "." for a name alone, "/" at the root. A new string. */
static char *parent_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	if (slash == NULL)
		return mill_strdup(".");
	return slash == path ? mill_strdup("/") : mill_strndup(path, (size_t)(slash - path));
}

static char *join(const char *folder, const char *name)
{
	if (strcmp(folder, ".") == 0)
		return mill_strdup(name);
	size_t len = strlen(folder);
	return mill_sprintf("%s%s%s", folder, len > 0 && folder[len - 1] == '/' ? "" : "/", name);
}

/* A link that is set anew, and a folder that comes back, show in the folder they lie in. */
static void add_way(struct mill_scan *scan, const char *path, unsigned depth);

/* True: it is a new one. */
static bool note_link(struct mill_scan *scan, const char *path)
{
	for (size_t i = 0; i < scan->link_count; i++)
		if (strcmp(scan->links[i], path) == 0)
			return false;
	scan->links = mill_realloc(scan->links, (scan->link_count + 1) * sizeof(scan->links[0]));
	scan->links[scan->link_count++] = mill_strdup(path);
	return true;
}

/* Links that lead through each other have more ways than anybody can go, but each has one. */
static void add_link(struct mill_scan *scan, const char *path, unsigned depth)
{
	char target[4096];
	ssize_t len = readlink(path, target, sizeof(target) - 1);
	if (len <= 0 || !note_link(scan, path))
		return;
	target[len] = '\0';
	char *folder = parent_of(path);
	add_folder(scan, folder, false);
	add_point(scan, path);
	char *whole = target[0] == '/' ? mill_strdup(target) : join(folder, target);
	add_way(scan, whole, depth + 1);
	free(whole);
	free(folder);
}

static void add_way(struct mill_scan *scan, const char *path, unsigned depth)
{
	if (depth > DEPTH_MOST)
		return;
	char *prefix = mill_strdup(path);
	bool missing = false;
	for (char *slash = prefix + 1; !missing && *slash != '\0'; slash++) {
		if (*slash != '/' && slash[1] != '\0')
			continue;
		bool last = *slash != '/';
		if (!last)
			*slash = '\0';
		struct stat stat;
		if (lstat(prefix, &stat) != 0)
			missing = true;
		else if (S_ISLNK(stat.st_mode))
			add_link(scan, prefix, depth);
		if (missing && !last) {
			char *folder = parent_of(prefix);
			add_folder(scan, folder, false);
			add_point(scan, prefix);
			free(folder);
		}
		if (!last)
			*slash = '/';
	}
	/* The end of a chain of links: what lies there changes there. */
	if (depth > 0 && !missing) {
		char *folder = parent_of(path);
		add_folder(scan, folder, false);
		add_point(scan, path);
		free(folder);
	}
	free(prefix);
}

/* ---- files --------------------------------------------------------------------------------- */

static uint64_t stamp_of(const struct stat *stat)
{
	const uint64_t parts[] = { (uint64_t)stat->st_ino,         (uint64_t)stat->st_size,
		                   (uint64_t)stat->st_mtim.tv_sec, (uint64_t)stat->st_mtim.tv_nsec,
		                   (uint64_t)stat->st_ctim.tv_sec, (uint64_t)stat->st_ctim.tv_nsec,
		                   (uint64_t)stat->st_dev };
	return mill_digest_content(parts, sizeof(parts));
}

static void read_file(struct mill_scan_file *file)
{
	struct stat stat;
	/* Not blocking: it may be a pipe that nobody writes to. */
	int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || fstat(fd, &stat) != 0 || !S_ISREG(stat.st_mode)) {
		file->digest = file->stamp = 0;
		if (fd >= 0)
			close(fd);
		return;
	}
	uint64_t stamp = stamp_of(&stat);
	if (stamp == file->stamp && file->digest != 0) {
		close(fd);
		return;
	}
	char *chunk = mill_alloc(READ_SIZE);
	uint64_t digest = MILL_DIGEST_BEGIN;
	ssize_t got;
	while ((got = read(fd, chunk, READ_SIZE)) > 0 || (got < 0 && errno == EINTR))
		if (got > 0)
			digest = mill_digest_more(digest, chunk, (size_t)got);
	free(chunk);
	close(fd);
	file->digest = got < 0 ? 0 : digest ? digest : 1;
	file->stamp = got < 0 ? 0 : stamp;
}

static void look_at(struct mill_scan *scan, struct mill_scan_file *file)
{
	char *folder = parent_of(file->path);
	struct stat stat;
	if (add_folder(scan, folder, false))
		add_way(scan, folder, 0);
	add_point(scan, file->path);
	if (lstat(file->path, &stat) == 0 && S_ISLNK(stat.st_mode))
		add_link(scan, file->path, 0);
	read_file(file);
	free(folder);
}

/* ---- the tree ------------------------------------------------------------------------------ */

struct walk {
	struct mill_scan *scan;
	size_t known; /* of the scan's files, in the order of their paths */
	size_t entries;
	struct stat above[DEPTH_MOST + 1]; /* the folders on the way down */
};

static bool is_lua(const char *name)
{
	size_t len = strlen(name);
	return len > 4 && strcmp(name + len - 4, ".lua") == 0;
}

static void walk_tree(struct walk *walk, const char *path, unsigned depth);

/* Hidden files are editors' own. */
static void walk_entry(struct walk *walk, const char *folder, const struct dirent *entry,
                       unsigned depth)
{
	struct mill_scan *scan = walk->scan;
	struct stat stat;
	if (entry->d_name[0] == '.')
		return;
	char *path = join(folder, entry->d_name);
	bool is_folder = entry->d_type == DT_DIR;
	if (entry->d_type == DT_LNK || entry->d_type == DT_UNKNOWN)
		is_folder = fstatat(AT_FDCWD, path, &stat, 0) == 0 && S_ISDIR(stat.st_mode);
	if (is_folder)
		walk_tree(walk, path, depth + 1);
	else if (is_lua(entry->d_name))
		add_tree_file(scan, walk->known, path);
	free(path);
}

/* A link may lead to a folder above itself: what lies there is walked already. */
static bool leads_upward(struct walk *walk, DIR *folder, unsigned depth)
{
	struct stat *here = &walk->above[depth];
	if (fstat(dirfd(folder), here) != 0)
		return true;
	for (unsigned i = 0; i < depth; i++)
		if (walk->above[i].st_ino == here->st_ino && walk->above[i].st_dev == here->st_dev)
			return true;
	return false;
}

static void walk_tree(struct walk *walk, const char *path, unsigned depth)
{
	DIR *folder = depth <= DEPTH_MOST ? opendir(path) : NULL;
	if (folder == NULL)
		return;
	if (leads_upward(walk, folder, depth)) {
		closedir(folder);
		return;
	}
	if (add_folder(walk->scan, path, true))
		add_way(walk->scan, path, 0);
	add_point(walk->scan, path);
	for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
		if (walk->entries++ >= TREE_MOST) {
			walk->scan->cut = true;
			break;
		}
		walk_entry(walk, path, entry, depth);
	}
	closedir(folder);
}

/* ---- the whole ----------------------------------------------------------------------------- */

static void identify(struct mill_scan_folder *folder)
{
	struct statx stat;
	folder->identity = 0;
	if (statx(AT_FDCWD, folder->path, 0, STATX_INO | STATX_BTIME | STATX_TYPE, &stat) != 0 ||
	    !S_ISDIR(stat.stx_mode))
		return;
	/* A number is used again when a folder was removed: the time of its birth tells. */
	const uint64_t parts[] = { stat.stx_ino, stat.stx_dev_major, stat.stx_dev_minor,
		                   (uint64_t)stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec };
	folder->identity = mill_digest_content(parts, sizeof(parts));
}

static int compare_folders(const void *a, const void *b)
{
	const struct mill_scan_folder *left = a, *right = b;
	return strcmp(left->path, right->path);
}

static int compare_points(const void *a, const void *b)
{
	const char *const *left = a, *const *right = b;
	return strcmp(*left, *right);
}

void mill_scan_run(struct mill_scan *scan)
{
	struct walk walk = { .scan = scan, .known = scan->file_count };
	if (scan->tree != NULL) {
		add_way(scan, scan->tree, 0);
		walk_tree(&walk, scan->tree, 0);
	}
	for (size_t i = 0; i < scan->file_count; i++)
		look_at(scan, &scan->files[i]);
	for (size_t i = 0; i < scan->folder_count; i++)
		identify(&scan->folders[i]);
	if (scan->folder_count > 1)
		qsort(scan->folders, scan->folder_count, sizeof(scan->folders[0]), compare_folders);
	if (scan->point_count > 1)
		qsort(scan->points, scan->point_count, sizeof(scan->points[0]), compare_points);
}

bool mill_scan_has_point(const struct mill_scan *scan, const char *path)
{
	return scan->point_count > 0 && bsearch(&path, scan->points, scan->point_count,
	                                        sizeof(scan->points[0]), compare_points) != NULL;
}

void mill_scan_free(struct mill_scan *scan)
{
	for (size_t i = 0; i < scan->file_count; i++)
		free(scan->files[i].path);
	for (size_t i = 0; i < scan->folder_count; i++)
		free(scan->folders[i].path);
	for (size_t i = 0; i < scan->point_count; i++)
		free(scan->points[i]);
	for (size_t i = 0; i < scan->link_count; i++)
		free(scan->links[i]);
	free(scan->links);
	free(scan->files);
	free(scan->folders);
	free(scan->points);
	free(scan->tree);
	*scan = (struct mill_scan){ 0 };
}
