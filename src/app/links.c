/* The runtime's connections: see links.h. */
#include "app/links.h"

#include <math.h>

/* An exchange unanswered for so long: the connection hangs. A renewal has less time. */
#define DEADLINE_SECS 60.0

static const struct {
	const char *name;
	enum mill_store_use use;
} uses[MILL_LINKS] = {
	[MILL_LINK_WORK] = { "work", MILL_USE_WORK },
	[MILL_LINK_LEASE] = { "lease", MILL_USE_LEASE },
	[MILL_LINK_SWEEP] = { "sweep", MILL_USE_SWEEP },
	[MILL_LINK_PUBLISH] = { "publish", MILL_USE_PUBLISH },
	[MILL_LINK_LISTEN] = { "listen", MILL_USE_LISTEN },
};

static double lease_deadline_secs(const struct mill_settings *settings)
{
	return fmin(DEADLINE_SECS, (double)settings->lease_secs / 2);
}

static struct mill_link *start(const struct mill_links_options *options, enum mill_links_use use)
{
	const struct mill_settings *settings = options->settings;
	struct mill_link_options link = {
		.loop = options->loop,
		.name = uses[use].name,
		.dsn = options->database ? options->database : settings->database,
		.deadline_secs = DEADLINE_SECS,
		.context = options->context,
	};
	if (use == MILL_LINK_LEASE) {
		link.deadline_secs = lease_deadline_secs(settings);
		link.on_up = options->on_lease_up;
	} else if (use == MILL_LINK_WORK || use == MILL_LINK_LISTEN) {
		link.on_up = options->on_wake;
	}
	if (use == MILL_LINK_LISTEN) {
		if (settings->listen_database != NULL)
			link.dsn = settings->listen_database;
		link.channels = options->channels;
		link.on_notify = options->on_notify;
	}
	mill_store_statements(options->store, uses[use].use, &link);
	return mill_link_new(&link);
}

void mill_links_start(const struct mill_links_options *options, struct mill_link *links[MILL_LINKS])
{
	for (size_t i = 0; i < MILL_LINKS; i++)
		links[i] = i == MILL_LINK_LISTEN && !options->settings->notify ? NULL
		                                                               : start(options, i);
}

void mill_links_follow(struct mill_link *const links[MILL_LINKS],
                       const struct mill_settings *settings)
{
	mill_link_set_deadline(links[MILL_LINK_LEASE], lease_deadline_secs(settings));
}

void mill_links_flush(struct mill_link *const links[MILL_LINKS])
{
	for (size_t i = 0; i < MILL_LINKS; i++)
		if (links[i] != NULL)
			mill_link_flush(links[i]);
}

size_t mill_links_close(struct mill_link *const links[MILL_LINKS], void (*on_closed)(void *context),
                        void *context)
{
	size_t count = 0;
	for (size_t i = 0; i < MILL_LINKS; i++)
		count += links[i] != NULL;
	for (size_t i = 0; i < MILL_LINKS; i++)
		if (links[i] != NULL)
			mill_link_close(links[i], on_closed, context);
	return count;
}
