/*
 * The runtime's connections: which there are, and what each is for.
 *
 * Runtime process.
 */
#pragma once

#include "core/config.h"
#include "pg/store.h"

enum mill_links_use {
	MILL_LINK_WORK,    /* claims and outcomes */
	MILL_LINK_LEASE,   /* renewal alone: nothing a publisher or a lock does delays it */
	MILL_LINK_SWEEP,   /* housekeeping; may wait for a lock */
	MILL_LINK_PUBLISH, /* what handlers publish; may wait for a stranger's dedupe key */
	MILL_LINK_LISTEN,  /* where notifications are on */
	MILL_LINKS,
};

struct mill_links_options {
	uv_loop_t *loop;
	const struct mill_store *store;
	const struct mill_settings *settings;
	const char *database;               /* instead of what the settings say; or NULL */
	const char *const *channels;        /* of LISTEN, NULL-terminated; stay with the caller */
	void (*on_wake)(void *context);     /* work or listen came up: something may be claimable */
	void (*on_lease_up)(void *context); /* lease came up */
	void (*on_notify)(const char *channel, const char *payload, void *context);
	void *context;
};

/* Start them; where notifications are off, there is no LISTEN: NULL. */
void mill_links_start(const struct mill_links_options *options,
                      struct mill_link *links[MILL_LINKS]);
/* Settings have changed that connections can follow. */
void mill_links_follow(struct mill_link *const links[MILL_LINKS],
                       const struct mill_settings *settings);
/* Send what was ended this turn. */
void mill_links_flush(struct mill_link *const links[MILL_LINKS]);
/* Close all; on_closed comes once for each. Returns how many. */
size_t mill_links_close(struct mill_link *const links[MILL_LINKS], void (*on_closed)(void *context),
                        void *context);
