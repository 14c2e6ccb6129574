/*
 * The runtime's own state, private to runtime.c (what it does while it works) and runtime_end.c
 * (how it stops).
 */
#pragma once

#include "app/links.h"
#include "app/reload.h"
#include "app/runtime.h"
#include "flow/claim.h"
#include "flow/dispatch.h"
#include "flow/lease.h"
#include "flow/listener.h"
#include "flow/orphan.h"
#include "flow/relay.h"
#include "flow/settle.h"

enum phase { LOADING, REGISTERING, RUNNING, REBORN, DRAINING, LEAVING, CLOSING };

struct mill_runtime {
	struct mill_runtime_options options;
	enum phase phase;
	struct mill_manifest settings; /* as config.lua alone gave it: for start and connections */
	bool was_ready, hasty;
	struct mill_lanes *lanes;
	char *queue_channel, *control_channel;
	const char *channels[3];

	struct mill_store *store;
	struct mill_link *links[MILL_LINKS];
	struct mill_reload *reload; /* the generations of executors */
	struct mill_dispatch *dispatch;
	struct mill_settle *settle;
	struct mill_relay *relay;
	struct mill_orphans orphans;
	struct mill_claim *claim;       /* NULL until registered */
	struct mill_lease *lease;       /* NULL until the manifest is known */
	struct mill_listener *listener; /* NULL where notifications are off */

	uv_prepare_t turn;
	uv_timer_t deadline; /* of the drain, then of giving up */
	bool killing;
	int to_close;
	int exit_code;
	struct mill_err err;
};

/* Those of the generation that serves, as soon as there is one. */
const struct mill_settings *mill_runtime_settings(const struct mill_runtime *runtime);
/* While it drains: is there nothing left to wait for? Then it leaves. Once a turn. */
void mill_runtime_check_drained(struct mill_runtime *runtime);
