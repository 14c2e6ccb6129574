/*
 * libcurl, loaded when the first request is made. Linked in, it and what it needs would cost every
 * start of the program, and every process of it, for the few that speak HTTP; and a machine whose
 * handlers do not would have to install it.
 *
 *     curl_easy_init()  is written  curl->easy_init()
 *
 * Executor process only.
 */
#pragma once

#include <curl/curl.h>

#include "core/err.h"

/* clang-format off */
#define MILL_CURL_FUNCTIONS(each) \
	each(global_init) each(version_info) each(slist_append) each(slist_free_all) \
	each(easy_init) each(easy_cleanup) each(easy_setopt) each(easy_getinfo) \
	each(easy_strerror) each(multi_init) each(multi_cleanup) each(multi_setopt) \
	each(multi_assign) each(multi_add_handle) each(multi_remove_handle) \
	each(multi_socket_action) each(multi_info_read) each(multi_strerror)
/* clang-format on */

struct mill_curl {
#define MILL_CURL_FIELD(name) __typeof__(curl_##name) *name;
	MILL_CURL_FUNCTIONS(MILL_CURL_FIELD)
#undef MILL_CURL_FIELD
};

/* The library, for the rest of the process; NULL: `err` says what to install. */
const struct mill_curl *mill_curl_load(struct mill_err *err);
