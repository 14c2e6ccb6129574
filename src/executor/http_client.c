/*
 * libcurl's multi interface on libuv: see http_client.h.
 *
 * libcurl says which sockets to watch and when to be called again; this file watches, calls, and
 * tells the owner of each transfer that ended. Lua runs from on_done, never inside of libcurl.
 */
#include "executor/http_client.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/list.h"
#include "executor/http_transfer.h"

#define IDLE_CONNECTIONS                                                                           \
	256 /* kept for the next request; libcurl ends those idle for 2 minutes                    \
	     */
#define CONNECTIONS_MAX 4096

struct mill_http_client {
	const struct mill_curl *curl;
	CURLM *multi;
	uv_loop_t *loop;
	uv_timer_t timer;
	size_t transfers, connections_max;
	struct mill_list watches;
};

/* A socket that libcurl waits for. */
struct watch {
	struct mill_link_node node;
	struct mill_http_client *client;
	uv_poll_t poll;
};

/* ---- transfers that ended ---------------------------------------------------------------------
 */

static void detach(struct mill_transfer *transfer)
{
	struct mill_http_client *client = transfer->client;
	client->curl->multi_remove_handle(client->multi, transfer->easy);
	transfer->client = NULL;
	client->transfers--;
}

static void end(struct mill_transfer *transfer, CURLcode code)
{
	mill_transfer_conclude(transfer, code);
	detach(transfer);
	transfer->on_done(transfer);
}

/* Each on_done may start and free transfers, so libcurl is asked again after each. */
static void conclude_ended(struct mill_http_client *client)
{
	const struct mill_curl *curl = client->curl;
	int left;
	for (CURLMsg *message; (message = curl->multi_info_read(client->multi, &left)) != NULL;) {
		if (message->msg != CURLMSG_DONE)
			continue;
		/* The message is gone with the handle. */
		CURLcode code = message->data.result;
		char *context = NULL;
		curl->easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &context);
		end((struct mill_transfer *)context, code);
	}
}

/* ---- sockets and time ---------------------------------------------------------------------------
 */

static void on_timer(uv_timer_t *timer)
{
	struct mill_http_client *client = mill_container_of(timer, struct mill_http_client, timer);
	int running;
	client->curl->multi_socket_action(client->multi, CURL_SOCKET_TIMEOUT, 0, &running);
	conclude_ended(client);
}

static int on_timer_wanted(CURLM *multi, long ms, void *context)
{
	struct mill_http_client *client = context;
	(void)multi;
	if (ms < 0) {
		uv_timer_stop(&client->timer);
		return 0;
	}
	/* The loop's idea of now is as old as its last turn. */
	uv_update_time(client->loop);
	return uv_timer_start(&client->timer, on_timer, (uint64_t)ms, 0) == 0 ? 0 : -1;
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
	struct watch *watch = mill_container_of(poll, struct watch, poll);
	struct mill_http_client *client = watch->client;
	uv_os_fd_t fd;
	/* What is wrong with a socket, libcurl learns best from the socket. */
	int running, ready = status < 0 ? CURL_CSELECT_IN | CURL_CSELECT_OUT : 0;
	if (events & UV_READABLE)
		ready |= CURL_CSELECT_IN;
	if (events & UV_WRITABLE)
		ready |= CURL_CSELECT_OUT;
	/* libcurl may end the watch meanwhile. */
	MILL_ASSERT(uv_fileno((uv_handle_t *)poll, &fd) == 0);
	client->curl->multi_socket_action(client->multi, fd, ready, &running);
	conclude_ended(client);
}

static void on_watch_closed(uv_handle_t *handle)
{
	free(mill_container_of((uv_poll_t *)handle, struct watch, poll));
}

static void end_watch(struct watch *watch)
{
	mill_list_remove(&watch->client->watches, &watch->node);
	/* Stopped at once: libcurl closes the socket now, and its number may be used again. */
	uv_poll_stop(&watch->poll);
	uv_close((uv_handle_t *)&watch->poll, on_watch_closed);
}

static struct watch *begin_watch(struct mill_http_client *client, curl_socket_t fd)
{
	struct watch *watch = mill_calloc(1, sizeof(*watch));
	watch->client = client;
	if (uv_poll_init_socket(client->loop, &watch->poll, fd) != 0) {
		free(watch);
		return NULL;
	}
	/* One that libcurl made itself, to hear of its resolver, is not close-on-exec yet. */
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	mill_list_push(&client->watches, &watch->node);
	client->curl->multi_assign(client->multi, fd, watch);
	return watch;
}

/* Called for each change of what libcurl waits for at a socket. */
static int on_watch_wanted(CURL *easy, curl_socket_t fd, int what, void *context, void *of_socket)
{
	struct mill_http_client *client = context;
	struct watch *watch = of_socket;
	(void)easy;
	if (what == CURL_POLL_REMOVE) {
		if (watch != NULL) {
			client->curl->multi_assign(client->multi, fd, NULL);
			end_watch(watch);
		}
		return 0;
	}
	if (watch == NULL && (watch = begin_watch(client, fd)) == NULL)
		return -1;
	int events =
	        (what & CURL_POLL_IN ? UV_READABLE : 0) | (what & CURL_POLL_OUT ? UV_WRITABLE : 0);
	return uv_poll_start(&watch->poll, events, on_ready) == 0 ? 0 : -1;
}

/* ---- the client
 * ----------------------------------------------------------------------------------- */

/*
 * A multi handle makes a pair of descriptors to be woken by, which programs that a handler starts
 * would inherit. They get the two lowest numbers that are free.
 */
static CURLM *make_multi(const struct mill_curl *curl)
{
	int pair[2];
	for (int i = 0; i < 2; i++)
		pair[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	for (int i = 0; i < 2; i++)
		if (pair[i] >= 0)
			close(pair[i]);
	CURLM *multi = curl->multi_init();
	for (int i = 0; i < 2; i++)
		if (pair[i] >= 0)
			fcntl(pair[i], F_SETFD, FD_CLOEXEC);
	return multi;
}

/* Half of the descriptors that the process may have: what finds no connection waits for one. */
static size_t connection_limit(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 2 > CONNECTIONS_MAX)
		return CONNECTIONS_MAX;
	return limit.rlim_cur / 2 > 0 ? limit.rlim_cur / 2 : 1;
}

struct mill_http_client *mill_http_client_new(uv_loop_t *loop, struct mill_err *err)
{
	const struct mill_curl *curl = mill_curl_load(err);
	if (curl == NULL)
		return NULL;
	CURLM *multi = make_multi(curl);
	if (multi == NULL) {
		mill_err_set(err, MILL_ERR_SYSTEM, "libcurl cannot be initialised");
		return NULL;
	}
	struct mill_http_client *client = mill_calloc(1, sizeof(*client));
	*client = (struct mill_http_client){
		.curl = curl, .multi = multi, .loop = loop, .connections_max = connection_limit()
	};
	mill_list_init(&client->watches);
	MILL_ASSERT(uv_timer_init(loop, &client->timer) == 0);
	curl->multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, on_watch_wanted);
	curl->multi_setopt(multi, CURLMOPT_SOCKETDATA, client);
	curl->multi_setopt(multi, CURLMOPT_TIMERFUNCTION, on_timer_wanted);
	curl->multi_setopt(multi, CURLMOPT_TIMERDATA, client);
	curl->multi_setopt(multi, CURLMOPT_MAXCONNECTS, (long)IDLE_CONNECTIONS);
	curl->multi_setopt(multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)client->connections_max);
	return client;
}

static void on_client_closed(uv_handle_t *handle)
{
	free(mill_container_of((uv_timer_t *)handle, struct mill_http_client, timer));
}

void mill_http_client_close(struct mill_http_client *client)
{
	const struct mill_curl *curl = client->curl;
	MILL_ASSERT(client->transfers == 0);
	curl->multi_setopt(client->multi, CURLMOPT_SOCKETFUNCTION, NULL);
	curl->multi_setopt(client->multi, CURLMOPT_TIMERFUNCTION, NULL);
	curl->multi_cleanup(client->multi);
	mill_list_each(node, &client->watches)
	        end_watch(mill_container_of(node, struct watch, node));
	uv_close((uv_handle_t *)&client->timer, on_client_closed);
}

/* ---- transfers
 * ------------------------------------------------------------------------------------ */

static void release(struct mill_transfer *transfer)
{
	if (transfer->easy != NULL)
		transfer->curl->easy_cleanup(transfer->easy);
	transfer->curl->slist_free_all(transfer->header_list);
	mill_buffer_free(&transfer->headers);
	mill_buffer_free(&transfer->body);
	free(transfer);
}

struct mill_transfer *mill_http_start(struct mill_http_client *client,
                                      const struct mill_http_request *request,
                                      void (*on_done)(struct mill_transfer *transfer),
                                      void *context, struct mill_err *err)
{
	struct mill_transfer *transfer = mill_calloc(1, sizeof(*transfer));
	transfer->curl = client->curl;
	transfer->on_done = on_done;
	transfer->context = context;
	if (mill_transfer_prepare(transfer, request, err) == 0) {
		CURLMcode code = client->curl->multi_add_handle(client->multi, transfer->easy);
		if (code == CURLM_OK) {
			transfer->client = client;
			transfer->queued = ++client->transfers > client->connections_max;
			return transfer;
		}
		mill_err_set(err, MILL_ERR_SYSTEM, "%s", client->curl->multi_strerror(code));
	}
	release(transfer);
	return NULL;
}

void *mill_transfer_context(const struct mill_transfer *transfer)
{
	return transfer->context;
}

const struct mill_http_reply *mill_transfer_reply(const struct mill_transfer *transfer)
{
	return &transfer->reply;
}

void mill_transfer_expire(struct mill_transfer *transfer)
{
	end(transfer, CURLE_OPERATION_TIMEDOUT);
}

void mill_transfer_free(struct mill_transfer *transfer)
{
	if (transfer->client != NULL)
		detach(transfer);
	release(transfer);
}
