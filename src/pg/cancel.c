/* Cancel requests off the loop: see cancel.h. */
#include "pg/cancel.h"

#include "core/base.h"

struct cancel {
	uv_work_t work;
	PGcancel *cancel;
	PGconn *connection; /* to be finished; or NULL */
};

static void work_cancel(uv_work_t *work)
{
	char reason[256];
	struct cancel *cancel = mill_container_of(work, struct cancel, work);
	PQcancel(cancel->cancel, reason, sizeof(reason));
}

static void on_cancelled(uv_work_t *work, int status)
{
	(void)status;
	struct cancel *cancel = mill_container_of(work, struct cancel, work);
	PQfreeCancel(cancel->cancel);
	PQfinish(cancel->connection);
	free(cancel);
}

static void start(uv_loop_t *loop, PGconn *connection, PGconn *finish)
{
	struct cancel *cancel = mill_calloc(1, sizeof(*cancel));
	cancel->cancel = PQgetCancel(connection);
	cancel->connection = finish;
	if (cancel->cancel == NULL ||
	    uv_queue_work(loop, &cancel->work, work_cancel, on_cancelled) != 0)
		on_cancelled(&cancel->work, 0);
}

void mill_cancel_running(uv_loop_t *loop, PGconn *connection)
{
	start(loop, connection, NULL);
}

void mill_cancel_and_finish(uv_loop_t *loop, PGconn *connection)
{
	start(loop, connection, connection);
}
