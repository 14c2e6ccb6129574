/* The version of libpq: see version.h. */
#include "pg/version.h"

#include <libpq-fe.h>

int mill_pg_client_version(void)
{
	return PQlibVersion();
}
