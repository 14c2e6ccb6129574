/*
 * A file of sample messages beside a config: one {"topic": …, "message": …} a line.
 *
 * Knows lines and JSON, no database.
 */
#pragma once

#include "core/err.h"

/* All of it as one JSON array, as publish_many takes it; a new string. NULL: `err` says why not. */
char *mill_sample_read(const char *path, struct mill_err *err);

/*
 * The topic and the message of the first line that has a topic without escapes, as new strings; the
 * message is JSON, `{}` where the line has none. −1: there is no such file or line.
 */
int mill_sample_first(const char *path, char **topic, char **message);
