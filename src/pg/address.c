/* DSNs and asynchronous name resolution: see address.h. */
#include "pg/address.h"

#include <libpq-fe.h>
#include <netdb.h>
#include <stdio.h>

#include "core/frame.h"

static const char *const every_connection[][2] = {
	{ "client_encoding", "UTF8" },
	/* A peer that is gone without a word: 15 s of silence, then 3 probes 5 s apart. */
	{ "keepalives_idle", "15" },
	{ "keepalives_interval", "5" },
	{ "keepalives_count", "3" },
	{ "tcp_user_timeout", "30000" },
};

void mill_address_set(struct mill_address *address, const char *keyword, const char *value)
{
	for (size_t i = 0; i < address->count; i++) {
		if (strcmp(address->keywords[i], keyword) == 0) {
			free(address->values[i]);
			address->values[i] = mill_strdup(value);
			return;
		}
	}
	MILL_ASSERT(address->count < MILL_ADDRESS_KEYWORDS);
	address->keywords[address->count] = mill_strdup(keyword);
	address->values[address->count++] = mill_strdup(value);
	address->keywords[address->count] = NULL;
	address->values[address->count] = NULL;
}

static const char *find(const struct mill_address *address, const char *keyword)
{
	for (size_t i = 0; i < address->count; i++)
		if (strcmp(address->keywords[i], keyword) == 0)
			return address->values[i];
	return NULL;
}

char *mill_address_get(const struct mill_address *address, const char *keyword)
{
	const char *value = find(address, keyword);
	if (value != NULL)
		return mill_strdup(value);
	char *copy = NULL;
	PQconninfoOption *defaults = PQconndefaults();
	for (PQconninfoOption *option = defaults; option && option->keyword; option++)
		if (strcmp(option->keyword, keyword) == 0 && option->val && option->val[0])
			copy = mill_strdup(option->val);
	PQconninfoFree(defaults);
	return copy;
}

int mill_address_parse(const char *dsn, const char *application_name, struct mill_address *address,
                       struct mill_err *err)
{
	*address = (struct mill_address){ 0 };
	char *message = NULL;
	PQconninfoOption *options = PQconninfoParse(dsn ? dsn : "", &message);
	if (options == NULL) {
		/* libpq quotes the text it could not read, which may hold a password: say less. */
		PQfreemem(message);
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "database: not a libpq URI or conninfo: write "
		                    "postgresql://user@host:5432/name or host=… dbname=…");
	}
	mill_address_set(address, "application_name", application_name);
	for (size_t i = 0; i < MILL_COUNT(every_connection); i++)
		mill_address_set(address, every_connection[i][0], every_connection[i][1]);
	for (PQconninfoOption *option = options; option->keyword; option++)
		if (option->val != NULL)
			mill_address_set(address, option->keyword, option->val);
	PQconninfoFree(options);
	/* With several servers the one that takes writes is wanted. */
	const char *host = find(address, "host");
	if (host != NULL && strchr(host, ',') != NULL && !find(address, "target_session_attrs"))
		mill_address_set(address, "target_session_attrs", "read-write");
	return 0;
}

void mill_address_free(struct mill_address *address)
{
	for (size_t i = 0; i < address->count; i++) {
		free((char *)address->keywords[i]);
		free(address->values[i]);
	}
	*address = (struct mill_address){ 0 };
}

/* One host of the list, with the port that belongs to it. */
struct host {
	char *name, *port, *numeric;
};

struct mill_resolve {
	uv_loop_t *loop;
	struct mill_address *address;
	void (*done)(const struct mill_err *err, void *context);
	void *context;
	uv_getaddrinfo_t request;
	uv_timer_t soon; /* the callback never comes from inside the call that asked */
	struct host *hosts;
	size_t count, at;
	bool abandoned;
	struct mill_err last;
};

static void on_soon_closed(uv_handle_t *handle)
{
	struct mill_resolve *resolve = mill_container_of(handle, struct mill_resolve, soon);
	for (size_t i = 0; i < resolve->count; i++) {
		free(resolve->hosts[i].name);
		free(resolve->hosts[i].port);
		free(resolve->hosts[i].numeric);
	}
	free(resolve->hosts);
	free(resolve);
}

static void release(struct mill_resolve *resolve)
{
	uv_close((uv_handle_t *)&resolve->soon, on_soon_closed);
}

static bool is_socket_folder(const char *host)
{
	return host[0] == '\0' || host[0] == '/' || host[0] == '@';
}

/* Put the hosts that were found back into the address, dropping the others. */
static int fill(struct mill_resolve *resolve, struct mill_err *err)
{
	struct mill_buffer hosts = { 0 }, ports = { 0 }, numerics = { 0 };
	size_t kept = 0;
	for (size_t i = 0; i < resolve->count; i++) {
		struct host *host = &resolve->hosts[i];
		if (host->numeric == NULL && !is_socket_folder(host->name))
			continue;
		const char *comma = kept++ ? "," : "";
		mill_buffer_text(&hosts, comma);
		mill_buffer_text(&hosts, host->name);
		mill_buffer_text(&ports, comma);
		mill_buffer_text(&ports, host->port);
		mill_buffer_text(&numerics, comma);
		mill_buffer_text(&numerics, host->numeric ? host->numeric : "");
	}
	if (kept > 0) {
		mill_buffer_bytes(&hosts, "", 1);
		mill_buffer_bytes(&ports, "", 1);
		mill_buffer_bytes(&numerics, "", 1);
		mill_address_set(resolve->address, "host", hosts.data);
		mill_address_set(resolve->address, "port", ports.data);
		mill_address_set(resolve->address, "hostaddr", numerics.data);
	} else {
		*err = resolve->last;
	}
	mill_buffer_free(&hosts);
	mill_buffer_free(&ports);
	mill_buffer_free(&numerics);
	return kept > 0 ? 0 : -1;
}

static void resolve_next(struct mill_resolve *resolve);

static void on_resolved(uv_getaddrinfo_t *request, int status, struct addrinfo *found)
{
	struct mill_resolve *resolve = mill_container_of(request, struct mill_resolve, request);
	if (resolve->abandoned) {
		uv_freeaddrinfo(found);
		release(resolve);
		return;
	}
	struct host *host = &resolve->hosts[resolve->at++];
	char numeric[NI_MAXHOST];
	if (status == 0 && getnameinfo(found->ai_addr, found->ai_addrlen, numeric, sizeof(numeric),
	                               NULL, 0, NI_NUMERICHOST) == 0)
		host->numeric = mill_strdup(numeric);
	else
		mill_err_set(&resolve->last, MILL_ERR_UNREACHED, "host `%s` is not known: %s",
		             host->name, status ? uv_strerror(status) : "no address");
	uv_freeaddrinfo(found);
	resolve_next(resolve);
}

static void resolve_next(struct mill_resolve *resolve)
{
	while (resolve->at < resolve->count) {
		struct host *host = &resolve->hosts[resolve->at];
		struct addrinfo hints = { .ai_socktype = SOCK_STREAM };
		if (!is_socket_folder(host->name) &&
		    uv_getaddrinfo(resolve->loop, &resolve->request, on_resolved, host->name, NULL,
		                   &hints) == 0)
			return;
		resolve->at++;
	}
	struct mill_err err = MILL_ERR_INIT;
	int failed = resolve->count > 0 ? fill(resolve, &err) : 0;
	resolve->done(failed ? &err : NULL, resolve->context);
	release(resolve);
}

static void on_soon(uv_timer_t *timer)
{
	resolve_next(mill_container_of(timer, struct mill_resolve, soon));
}

/* The n-th item of a comma-separated list; a list of one serves all. */
static char *list_item(const char *list, size_t n)
{
	bool single = strchr(list, ',') == NULL;
	for (size_t i = 0; i < n && !single; i++) {
		const char *comma = strchr(list, ',');
		if (comma == NULL)
			return mill_strdup("");
		list = comma + 1;
	}
	return mill_strndup(list, strcspn(list, ","));
}

struct mill_resolve *mill_address_resolve(uv_loop_t *loop, struct mill_address *address,
                                          void (*done)(const struct mill_err *err, void *context),
                                          void *context)
{
	struct mill_resolve *resolve = mill_calloc(1, sizeof(*resolve));
	resolve->loop = loop;
	resolve->address = address;
	resolve->done = done;
	resolve->context = context;
	char *hosts = mill_address_get(address, "host");
	char *numerics = mill_address_get(address, "hostaddr");
	char *ports = mill_address_get(address, "port");
	if (hosts != NULL && numerics == NULL) {
		resolve->count = 1;
		for (const char *c = hosts; *c; c++)
			resolve->count += *c == ',';
		resolve->hosts = mill_calloc(resolve->count, sizeof(resolve->hosts[0]));
		for (size_t i = 0; i < resolve->count; i++) {
			resolve->hosts[i].name = list_item(hosts, i);
			resolve->hosts[i].port = list_item(ports ? ports : "", i);
		}
	}
	free(hosts);
	free(numerics);
	free(ports);
	MILL_ASSERT(uv_timer_init(loop, &resolve->soon) == 0);
	uv_timer_start(&resolve->soon, on_soon, 0, 0);
	return resolve;
}

void mill_resolve_abandon(struct mill_resolve *resolve)
{
	resolve->abandoned = true;
	/* Not begun, or a look-up that can be taken back: then no callback will free it. */
	if (uv_is_active((uv_handle_t *)&resolve->soon)) {
		release(resolve);
		return;
	}
	uv_cancel((uv_req_t *)&resolve->request); /* its callback comes either way, and frees */
}
