/* What libcurl is told about one transfer, and what came of it: see http_transfer.h. */
#include "executor/http_transfer.h"

#include <math.h>
#include <stdio.h>
#include <sys/socket.h>

#define HEADERS_MAX (256 * 1024) /* bytes of a reply's header */
#define PROTOCOLS "http,https"
#define CA_KEPT_SECS 600L

/* ---- what libcurl calls while a transfer goes on -------------------------------------------- */

static curl_socket_t on_open_socket(void *context, curlsocktype purpose,
                                    struct curl_sockaddr *address)
{
	struct mill_transfer *transfer = context;
	(void)purpose;
	transfer->phase = MILL_TRANSFER_CONNECT;
	/* No program that a handler starts shall hold it open. */
	return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

static CURLcode on_handshake(CURL *easy, void *tls, void *context)
{
	struct mill_transfer *transfer = context;
	(void)easy, (void)tls;
	transfer->phase = MILL_TRANSFER_HANDSHAKE;
	return CURLE_OK;
}

static int on_connected(void *context, char *address, char *own, int port, int own_port)
{
	struct mill_transfer *transfer = context;
	(void)address, (void)own, (void)port, (void)own_port;
	transfer->phase = MILL_TRANSFER_WAIT;
	return CURL_PREREQFUNC_OK;
}

static size_t on_header(char *line, size_t size, size_t count, void *context)
{
	struct mill_transfer *transfer = context;
	size_t len = size * count;
	transfer->phase = MILL_TRANSFER_READ;
	/* The next reply of several: after a 100, or before a new connection's. */
	if (len >= 5 && memcmp(line, "HTTP/", 5) == 0) {
		transfer->headers.len = 0;
		transfer->header_ended = false;
		return len;
	}
	if (transfer->header_ended)
		return len;
	if (transfer->headers.len + len > HEADERS_MAX) {
		transfer->headers_too_large = true;
		return 0;
	}
	transfer->header_ended = len == 0 || line[0] == '\r' || line[0] == '\n';
	mill_buffer_bytes(&transfer->headers, line, len);
	return len;
}

/* Bytes of the body, decompressed. What the server announces is believed when it is too much. */
static size_t on_body(char *bytes, size_t size, size_t count, void *context)
{
	struct mill_transfer *transfer = context;
	size_t len = size * count;
	curl_off_t announced = -1;
	if (transfer->body.len == 0)
		transfer->curl->easy_getinfo(transfer->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T,
		                             &announced);
	if (len > transfer->max_bytes - transfer->body.len ||
	    (announced > 0 && (uint64_t)announced > transfer->max_bytes)) {
		transfer->body_too_large = true;
		return 0;
	}
	mill_buffer_bytes(&transfer->body, bytes, len);
	return len;
}

/* ---- what libcurl is told ---------------------------------------------------------------------
 */

static int append_header(struct mill_transfer *transfer, const char *line)
{
	struct curl_slist *list = transfer->curl->slist_append(transfer->header_list, line);
	if (list == NULL)
		return -1;
	transfer->header_list = list;
	return 0;
}

/* `Name: value` as libcurl wants it; −1: it is no such line. */
static int add_header(struct mill_transfer *transfer, const char *line, size_t len)
{
	const char *colon = memchr(line, ':', len);
	if (colon == NULL || colon == line)
		return -1;
	for (size_t i = 0; i < len; i++)
		if (((unsigned char)line[i] < ' ' && line[i] != '\t') || line[i] == 0x7f)
			return -1;
	char *copy = mill_strndup(line, len);
	/* A header without a value is written with a semicolon; a colon would leave it out. */
	if (strspn(colon + 1, " \t") >= len - (size_t)(colon + 1 - line)) {
		copy[colon - line] = ';';
		copy[colon - line + 1] = '\0';
	}
	int result = append_header(transfer, copy);
	free(copy);
	return result;
}

static bool is_named(const char *line, size_t len, const char *name)
{
	size_t name_len = strlen(name);
	return len > name_len && line[name_len] == ':' && strncasecmp(line, name, name_len) == 0;
}

/* The request's header lines, and none that libcurl would add by itself. */
static int add_headers(struct mill_transfer *transfer, struct mill_span lines, struct mill_err *err)
{
	bool has_type = false, has_expect = false;
	const char *at = lines.data, *end = lines.data + lines.len;
	for (const char *newline; at < end; at = newline + 1) {
		newline = memchr(at, '\n', (size_t)(end - at));
		size_t len = newline ? (size_t)(newline - at) : 0;
		if (newline == NULL || add_header(transfer, at, len) != 0)
			return mill_err_set(err, MILL_ERR_INPUT,
			                    "a header cannot be sent as it is");
		has_type = has_type || is_named(at, len, "content-type");
		has_expect = has_expect || is_named(at, len, "expect");
	}
	if ((!has_type && append_header(transfer, "Content-Type:") != 0) ||
	    (!has_expect && append_header(transfer, "Expect:") != 0))
		return mill_err_set(err, MILL_ERR_SYSTEM, "no memory for a request");
	return 0;
}

static bool takes_body(const char *method)
{
	return strcmp(method, "POST") == 0 || strcmp(method, "PUT") == 0 ||
	       strcmp(method, "PATCH") == 0;
}

/* Numbers are longs, but for curl_off_t: libcurl takes the types on trust. */
#define SET(option, value) (curl->easy_setopt(easy, (option), (value)) == CURLE_OK)

/* Method and body. A method that is used to have one says so even when it is empty. */
static bool set_method(const struct mill_curl *curl, CURL *easy,
                       const struct mill_http_request *request)
{
	bool ok = true;
	if (strcmp(request->method, "HEAD") == 0)
		return SET(CURLOPT_NOBODY, 1L);
	if (request->body.data != NULL || takes_body(request->method))
		ok = SET(CURLOPT_POST, 1L) &&
		     SET(CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)request->body.len) &&
		     SET(CURLOPT_POSTFIELDS, request->body.data ? request->body.data : "");
	return ok && SET(CURLOPT_CUSTOMREQUEST, request->method);
}

static bool set_limits(const struct mill_curl *curl, CURL *easy,
                       const struct mill_http_request *request)
{
	return SET(CURLOPT_PROTOCOLS_STR, PROTOCOLS) &&
	       SET(CURLOPT_REDIR_PROTOCOLS_STR, PROTOCOLS) &&
	       SET(CURLOPT_TIMEOUT_MS, lrint(ceil(request->timeout_secs * 1000))) &&
	       SET(CURLOPT_CONNECTTIMEOUT_MS, lrint(ceil(request->connect_timeout_secs * 1000)));
}

/*
 * Whom to trust: one file, ours or the system's. Without its folder of certificates besides,
 * libcurl keeps what it read of the file for the next connections, for so long.
 */
static bool set_trust(const struct mill_curl *curl, CURL *easy, const char *ca_file)
{
	curl->easy_setopt(easy, CURLOPT_CA_CACHE_TIMEOUT, CA_KEPT_SECS);
	if (ca_file != NULL || curl->version_info(CURLVERSION_NOW)->cainfo != NULL)
		curl->easy_setopt(easy, CURLOPT_CAPATH, NULL);
	return SET(CURLOPT_SSL_VERIFYPEER, 1L) && SET(CURLOPT_SSL_VERIFYHOST, 2L) &&
	       (ca_file == NULL || SET(CURLOPT_CAINFO, ca_file));
}

static bool set_callbacks(const struct mill_curl *curl, CURL *easy, struct mill_transfer *transfer)
{
	/* Not every build knows it. Without, a handshake counts as connecting. */
	curl->easy_setopt(easy, CURLOPT_SSL_CTX_FUNCTION, on_handshake);
	curl->easy_setopt(easy, CURLOPT_SSL_CTX_DATA, transfer);
	return SET(CURLOPT_PRIVATE, transfer) && SET(CURLOPT_ERRORBUFFER, transfer->detail) &&
	       SET(CURLOPT_OPENSOCKETFUNCTION, on_open_socket) &&
	       SET(CURLOPT_OPENSOCKETDATA, transfer) && SET(CURLOPT_PREREQFUNCTION, on_connected) &&
	       SET(CURLOPT_PREREQDATA, transfer) && SET(CURLOPT_HEADERFUNCTION, on_header) &&
	       SET(CURLOPT_HEADERDATA, transfer) && SET(CURLOPT_WRITEFUNCTION, on_body) &&
	       SET(CURLOPT_WRITEDATA, transfer);
}

int mill_transfer_prepare(struct mill_transfer *transfer, const struct mill_http_request *request,
                          struct mill_err *err)
{
	const struct mill_curl *curl = transfer->curl;
	CURL *easy = transfer->easy = curl->easy_init();
	if (easy == NULL)
		return mill_err_set(err, MILL_ERR_SYSTEM, "no memory for a request");
	transfer->timeout_secs = request->timeout_secs;
	transfer->connect_timeout_secs = request->connect_timeout_secs;
	transfer->max_bytes = request->max_bytes;
	transfer->request_bytes = request->body.len;
	if (add_headers(transfer, request->headers, err) != 0)
		return -1;
	/*
	 * Signals are the process's own. Without QUICK_EXIT a transfer that is freed during a
	 * lookup would wait for the resolver's thread; a library that does not know it yet waits.
	 */
	curl->easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
	if (set_callbacks(curl, easy, transfer) && set_limits(curl, easy, request) &&
	    set_trust(curl, easy, request->ca_file) && set_method(curl, easy, request) &&
	    SET(CURLOPT_NOSIGNAL, 1L) && SET(CURLOPT_URL, request->url) &&
	    SET(CURLOPT_HTTPHEADER, transfer->header_list) &&
	    SET(CURLOPT_USERAGENT, "tidemill/" MILL_VERSION) &&
	    SET(CURLOPT_ACCEPT_ENCODING, "gzip, deflate") &&
	    SET(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L))
		return 0;
	return mill_err_set(err, MILL_ERR_SYSTEM, "libcurl refuses an option of the request");
}

#undef SET

/* ---- what came of it ----------------------------------------------------------------------------
 */

static void explain_timeout(struct mill_transfer *transfer)
{
	static const char *const doing[] = {
		[MILL_TRANSFER_LOOKUP] = "looking up the host",
		[MILL_TRANSFER_CONNECT] = "connecting",
		[MILL_TRANSFER_HANDSHAKE] = "in the TLS handshake",
		[MILL_TRANSFER_WAIT] = "waiting for the reply",
		[MILL_TRANSFER_READ] = "reading the reply",
	};
	curl_off_t sent = 0;
	transfer->curl->easy_getinfo(transfer->easy, CURLINFO_SIZE_UPLOAD_T, &sent);
	bool sending =
	        transfer->phase == MILL_TRANSFER_WAIT && (uint64_t)sent < transfer->request_bytes;
	bool queued = transfer->phase == MILL_TRANSFER_LOOKUP && transfer->queued;
	double limit = transfer->timeout_secs;
	if (transfer->phase < MILL_TRANSFER_WAIT && !queued)
		limit = fmin(limit, transfer->connect_timeout_secs);
	mill_err_set(&transfer->failure, MILL_ERR_UNREACHED, "timed out after %g s, %s", limit,
	             queued    ? "waiting for a free connection"
	             : sending ? "sending the request"
	                       : doing[transfer->phase]);
}

static const struct failure {
	CURLcode code;
	const char *text;
	enum { SAY_NOTHING, SAY_DETAIL, SAY_ERRNO } more;
} failures[] = {
	{ CURLE_UNSUPPORTED_PROTOCOL, "only HTTP is spoken here", SAY_DETAIL },
	{ CURLE_URL_MALFORMAT, "the URL is malformed", SAY_DETAIL },
	{ CURLE_COULDNT_RESOLVE_HOST, "the host's name cannot be resolved", SAY_NOTHING },
	{ CURLE_COULDNT_RESOLVE_PROXY, "the proxy's name cannot be resolved", SAY_NOTHING },
	{ CURLE_COULDNT_CONNECT, "cannot connect", SAY_ERRNO },
	{ CURLE_PEER_FAILED_VERIFICATION, "the server's certificate is refused", SAY_DETAIL },
	{ CURLE_SSL_CONNECT_ERROR, "the TLS handshake failed", SAY_DETAIL },
	{ CURLE_SSL_CACERT_BADFILE, "the file of certificates cannot be read", SAY_DETAIL },
	{ CURLE_GOT_NOTHING, "the server closed the connection without a reply", SAY_NOTHING },
	{ CURLE_PARTIAL_FILE, "the connection ended before the reply did", SAY_DETAIL },
	{ CURLE_SEND_ERROR, "the connection broke while the request was sent", SAY_DETAIL },
	{ CURLE_RECV_ERROR, "the connection broke while the reply was read", SAY_DETAIL },
	{ CURLE_BAD_CONTENT_ENCODING, "the reply cannot be decompressed", SAY_DETAIL },
	{ CURLE_WEIRD_SERVER_REPLY, "the server's reply is no HTTP", SAY_DETAIL },
};

static const char *os_error(struct mill_transfer *transfer)
{
	long code = 0;
	transfer->curl->easy_getinfo(transfer->easy, CURLINFO_OS_ERRNO, &code);
	return code != 0 ? strerror((int)code) : transfer->detail;
}

static void explain(struct mill_transfer *transfer, CURLcode code)
{
	struct mill_err *err = &transfer->failure;
	const struct failure *failure = NULL;
	for (size_t i = 0; i < MILL_COUNT(failures) && failure == NULL; i++)
		failure = failures[i].code == code ? &failures[i] : NULL;
	const char *text = failure ? failure->text : transfer->curl->easy_strerror(code);
	const char *more = failure && failure->more == SAY_NOTHING ? ""
	                   : failure && failure->more == SAY_ERRNO ? os_error(transfer)
	                                                           : transfer->detail;
	if (transfer->body_too_large)
		mill_err_set(err, MILL_ERR_INPUT,
		             "the reply's body has more than %zu bytes (max_bytes)",
		             transfer->max_bytes);
	else if (transfer->headers_too_large)
		mill_err_set(err, MILL_ERR_INPUT, "the reply's header has more than %d bytes",
		             HEADERS_MAX);
	else if (code == CURLE_OPERATION_TIMEDOUT)
		explain_timeout(transfer);
	else
		mill_err_set(err, MILL_ERR_UNREACHED, "%s%s%s", text, more[0] ? ": " : "", more);
}

void mill_transfer_conclude(struct mill_transfer *transfer, CURLcode code)
{
	const struct mill_curl *curl = transfer->curl;
	struct mill_http_reply *reply = &transfer->reply;
	if (code != CURLE_OK) {
		explain(transfer, code);
		reply->failed = true;
		reply->failure = MILL_SPAN(transfer->failure.message);
		return;
	}
	long status = 0;
	char *redirect_url = NULL;
	curl_off_t us = 0;
	curl->easy_getinfo(transfer->easy, CURLINFO_RESPONSE_CODE, &status);
	curl->easy_getinfo(transfer->easy, CURLINFO_REDIRECT_URL, &redirect_url);
	curl->easy_getinfo(transfer->easy, CURLINFO_TOTAL_TIME_T, &us);
	reply->status = (int)status;
	reply->headers = (struct mill_span){ transfer->headers.data, transfer->headers.len };
	reply->body = (struct mill_span){ transfer->body.data, transfer->body.len };
	reply->redirect_url = redirect_url ? MILL_SPAN(redirect_url) : MILL_SPAN_NONE;
	reply->secs = (double)us / 1e6;
}
