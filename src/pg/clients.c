/* A bounded set of connections and the queue before it: see clients.h. */
#include "pg/clients.h"

#include "core/clock.h"

/* What the set remembers of a client. */
struct entry {
	struct mill_link_node node; /* in `idle`, `taken` or `cleaning` */
	struct mill_client *client;
	uint64_t idle_since_ns;
};

struct mill_clients {
	struct mill_clients_options options;
	struct mill_list idle; /* used last: first */
	struct mill_list taken, cleaning;
	struct mill_list waiting;
	uv_timer_t timer; /* the next idle one to close */
	bool closing;
};

static struct entry *entry_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct entry, node);
}

static struct entry *find(struct mill_list *list, const struct mill_client *client)
{
	mill_list_each(node, list)
	{
		if (entry_at(node)->client == client)
			return entry_at(node);
	}
	return NULL;
}

static void drop(struct mill_list *list, struct entry *entry)
{
	mill_list_remove(list, &entry->node);
	mill_client_close(entry->client);
	free(entry);
}

/* ---- idle ---------------------------------------------------------------------------------- */

static void watch_idle(struct mill_clients *clients);

static void on_idle_timer(uv_timer_t *timer)
{
	struct mill_clients *clients = mill_container_of(timer, struct mill_clients, timer);
	uint64_t now = mill_clock_ns(), limit = (uint64_t)(clients->options.idle_secs * 1e9);
	mill_list_each(node, &clients->idle)
	{
		if (now - entry_at(node)->idle_since_ns >= limit)
			drop(&clients->idle, entry_at(node));
	}
	watch_idle(clients);
}

/* The one that was used longest ago is last. */
static void watch_idle(struct mill_clients *clients)
{
	if (mill_list_empty(&clients->idle) || uv_is_active((uv_handle_t *)&clients->timer))
		return;
	uint64_t limit = (uint64_t)(clients->options.idle_secs * 1e9);
	uint64_t since = mill_clock_ns() - entry_at(clients->idle.head.prev)->idle_since_ns;
	uint64_t left = since < limit ? limit - since : 0;
	uv_timer_start(&clients->timer, on_idle_timer, left / 1000000 + 1, 0);
}

static void on_idle_loss(struct mill_client *client, void *context)
{
	struct mill_clients *clients = context;
	struct entry *entry = find(&clients->idle, client);
	/* One that somebody has is told when it is asked next. */
	if (entry != NULL)
		drop(&clients->idle, entry);
}

/* ---- taking and giving --------------------------------------------------------------------- */

static struct entry *new_entry(struct mill_clients *clients)
{
	struct entry *entry = mill_calloc(1, sizeof(*entry));
	entry->client = mill_client_new(&(struct mill_client_options){
	        .loop = clients->options.loop,
	        .dsn = clients->options.dsn,
	        .application = clients->options.application,
	        .on_idle_loss = on_idle_loss,
	        .context = clients,
	});
	return entry;
}

static size_t count(const struct mill_clients *clients)
{
	return clients->idle.len + clients->taken.len + clients->cleaning.len;
}

struct mill_client *mill_clients_take(struct mill_clients *clients, struct mill_clients_turn *turn)
{
	struct entry *entry = NULL;
	struct mill_link_node *node = mill_list_shift(&clients->idle);
	if (node != NULL)
		entry = entry_at(node);
	else if (count(clients) < clients->options.most)
		entry = new_entry(clients);
	if (entry == NULL) {
		mill_list_push(&clients->waiting, &turn->node);
		return NULL;
	}
	mill_list_push(&clients->taken, &entry->node);
	return entry->client;
}

void mill_clients_leave(struct mill_clients *clients, struct mill_clients_turn *turn)
{
	if (turn->node.next != NULL)
		mill_list_remove(&clients->waiting, &turn->node);
}

static void hand_on(struct mill_clients *clients, struct entry *entry)
{
	struct mill_link_node *node = mill_list_shift(&clients->waiting);
	if (node != NULL) {
		struct mill_clients_turn *turn =
		        mill_container_of(node, struct mill_clients_turn, node);
		mill_list_push(&clients->taken, &entry->node);
		turn->on_turn(turn, entry->client);
	} else if (mill_client_is_open(entry->client)) {
		entry->idle_since_ns = mill_clock_ns();
		mill_list_push_front(&clients->idle, &entry->node);
		watch_idle(clients);
	} else {
		mill_client_close(entry->client);
		free(entry);
	}
}

static void on_cleaned(struct mill_client *client, bool good, void *context)
{
	struct mill_clients *clients = context;
	struct entry *entry = find(&clients->cleaning, client);
	MILL_ASSERT(entry != NULL);
	(void)good; /* one that is no good has no connection, and makes a new one when asked */
	mill_list_remove(&clients->cleaning, &entry->node);
	hand_on(clients, entry);
}

void mill_clients_give(struct mill_clients *clients, struct mill_client *client)
{
	if (clients->closing)
		return;
	struct entry *entry = find(&clients->taken, client);
	MILL_ASSERT(entry != NULL);
	mill_list_remove(&clients->taken, &entry->node);
	if (mill_client_is_busy(client)) {
		mill_client_close(client);
		entry->client = NULL;
		struct entry *fresh = new_entry(clients);
		free(entry);
		hand_on(clients, fresh);
	} else if (mill_client_clean(client, on_cleaned)) {
		hand_on(clients, entry);
	} else {
		mill_list_push(&clients->cleaning, &entry->node);
	}
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_clients *mill_clients_new(const struct mill_clients_options *options)
{
	struct mill_clients *clients = mill_calloc(1, sizeof(*clients));
	clients->options = *options;
	clients->options.dsn = options->dsn ? mill_strdup(options->dsn) : NULL;
	mill_list_init(&clients->idle);
	mill_list_init(&clients->taken);
	mill_list_init(&clients->cleaning);
	mill_list_init(&clients->waiting);
	MILL_ASSERT(uv_timer_init(options->loop, &clients->timer) == 0);
	return clients;
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_clients *clients = mill_container_of(handle, struct mill_clients, timer);
	free((char *)clients->options.dsn);
	free(clients);
}

void mill_clients_close(struct mill_clients *clients)
{
	if (clients == NULL)
		return;
	clients->closing = true;
	struct mill_list *lists[] = { &clients->idle, &clients->taken, &clients->cleaning };
	for (size_t i = 0; i < MILL_COUNT(lists); i++)
		mill_list_each(node, lists[i])
		{
			drop(lists[i], entry_at(node));
		}
	MILL_ASSERT(mill_list_empty(&clients->waiting));
	uv_close((uv_handle_t *)&clients->timer, on_timer_closed);
}
