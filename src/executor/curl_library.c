/* libcurl at run time: see curl_library.h. */
#include "executor/curl_library.h"

#include <dlfcn.h>

/* The first with CURLOPT_PROTOCOLS_STR, by which a transfer is kept to http and https. */
#define OLDEST_VERSION 0x075500
#define OLDEST_VERSION_TEXT "7.85"

/* The names of its builds with OpenSSL and with GnuTLS; either does. */
static const char *const library_names[] = { "libcurl.so.4", "libcurl-gnutls.so.4" };

static const struct {
	const char *name;
	size_t offset; /* in struct mill_curl */
} symbols[] = {
#define SYMBOL(function) { "curl_" #function, offsetof(struct mill_curl, function) },
	MILL_CURL_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

static void *open_library(void)
{
	void *library = NULL;
	for (size_t i = 0; i < MILL_COUNT(library_names) && library == NULL; i++)
		library = dlopen(library_names[i], RTLD_NOW | RTLD_LOCAL);
	return library;
}

static int load(struct mill_curl *curl, struct mill_err *err)
{
	/* Never closed: it may not be once it was initialised. */
	void *library = open_library();
	if (library == NULL)
		return mill_err_set(err, MILL_ERR_SYSTEM,
		                    "needs %s: install Debian's package libcurl4 (%s)",
		                    library_names[0], dlerror());
	for (size_t i = 0; i < MILL_COUNT(symbols); i++) {
		void *function = dlsym(library, symbols[i].name);
		if (function == NULL)
			return mill_err_set(err, MILL_ERR_SYSTEM, "the libcurl found has no %s",
			                    symbols[i].name);
		memcpy((char *)curl + symbols[i].offset, &function, sizeof(function));
	}
	const curl_version_info_data *version = curl->version_info(CURLVERSION_NOW);
	if (version->version_num < OLDEST_VERSION)
		return mill_err_set(err, MILL_ERR_SYSTEM, "needs libcurl %s or newer, found %s",
		                    OLDEST_VERSION_TEXT, version->version);
	if (curl->global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
		return mill_err_set(err, MILL_ERR_SYSTEM, "libcurl cannot be initialised");
	return 0;
}

const struct mill_curl *mill_curl_load(struct mill_err *err)
{
	static struct mill_curl curl;
	static bool loaded;
	if (!loaded && load(&curl, err) != 0)
		return NULL;
	loaded = true;
	return &curl;
}
