/*
 * Scan: what the files an app depends on hold at this moment, and where a change of them would
 * show.
 *
 * Blocking, and touches nothing but its own memory, so that it can run in a thread: a file system
 * may stand still.
 */
#pragma once

#include "core/base.h"

/* A file, there or not. */
struct mill_scan_file {
	char *path;
	uint64_t digest; /* of its content; 0: it is not there, or is no file */
	uint64_t stamp;  /* of its size and times: while it is the same, the content was not read
	                    again */
	bool in_tree;    /* after: it lies there, known before or not */
};

/* A folder to be watched. */
struct mill_scan_folder {
	char *path;
	uint64_t identity; /* of what lies there now; 0: nothing */
	bool tree;         /* it is the folder of handlers, or below it */
};

struct mill_scan {
	char *tree; /* the folder whose .lua files count, known or not, and those below it; or NULL
	             */
	/*
	 * Before: the files that are known, with the digest and stamp they had. After: the same in
	 * the same order with what they have now, and behind them those of the tree that were not
	 * known.
	 */
	struct mill_scan_file *files;
	size_t file_count;
	/* After: in the order of their paths, each once. */
	struct mill_scan_folder *folders;
	size_t folder_count;
	/*
	 * After, the same: paths whose coming, going or changing matters; files, and the links and
	 * folders on the way to them.
	 */
	char **points;
	size_t point_count;
	bool cut;     /* the tree is too large: not all of it was looked at */
	char **links; /* the scan's own: links whose way has been gone already */
	size_t link_count;
};

/* Takes over nothing; fills in the rest. */
void mill_scan_run(struct mill_scan *scan);
void mill_scan_free(struct mill_scan *scan);

/* Is it one of the points? */
bool mill_scan_has_point(const struct mill_scan *scan, const char *path);
