/* What a connection knows of statements: see prepared.h. */
#include "pg/prepared.h"

#include <stdio.h>

#define KEPT 64              /* texts of one connection */
#define TEXT_MAX (16 * 1024) /* a longer one is not worth keeping */

void mill_prepared_init(struct mill_prepared *prepared)
{
	*prepared = (struct mill_prepared){ 0 };
	mill_list_init(&prepared->statements);
}

static void statement_free(struct mill_prepared *prepared,
                           struct mill_prepared_statement *statement)
{
	mill_list_remove(&prepared->statements, &statement->node);
	free(statement->sql);
	free(statement);
}

static struct mill_prepared_statement *at(struct mill_link_node *node)
{
	return mill_container_of(node, struct mill_prepared_statement, node);
}

void mill_prepared_clear(struct mill_prepared *prepared)
{
	mill_list_each(node, &prepared->statements)
	{
		statement_free(prepared, at(node));
	}
	mill_buffer_free(&prepared->stale);
}

void mill_prepared_forget(struct mill_prepared *prepared, struct mill_prepared_statement *statement)
{
	if (statement->on_server) {
		mill_buffer_text(&prepared->stale, "DEALLOCATE ");
		mill_buffer_text(&prepared->stale, statement->name);
		mill_buffer_text(&prepared->stale, ";");
	}
	statement_free(prepared, statement);
}

static uint64_t hash_of(struct mill_span text)
{
	uint64_t hash = UINT64_C(14695981039346656037);
	for (size_t i = 0; i < text.len; i++)
		hash = (hash ^ (unsigned char)text.data[i]) * UINT64_C(1099511628211);
	return hash;
}

static struct mill_prepared_statement *add(struct mill_prepared *prepared, struct mill_span sql,
                                           uint64_t hash)
{
	if (prepared->statements.len == KEPT)
		mill_prepared_forget(prepared, at(prepared->statements.head.prev));
	struct mill_prepared_statement *statement = mill_calloc(1, sizeof(*statement));
	statement->sql = mill_span_dup(sql);
	statement->hash = hash;
	snprintf(statement->name, sizeof(statement->name), "s%llu",
	         (unsigned long long)++prepared->names);
	mill_list_push_front(&prepared->statements, &statement->node);
	return statement;
}

struct mill_prepared_statement *mill_prepared_use(struct mill_prepared *prepared,
                                                  struct mill_span sql)
{
	if (sql.len > TEXT_MAX)
		return NULL;
	uint64_t hash = hash_of(sql);
	mill_list_each(node, &prepared->statements)
	{
		struct mill_prepared_statement *statement = at(node);
		if (statement->hash != hash || strlen(statement->sql) != sql.len ||
		    memcmp(statement->sql, sql.data, sql.len) != 0)
			continue;
		mill_list_remove(&prepared->statements, node);
		mill_list_push_front(&prepared->statements, node);
		return statement;
	}
	return add(prepared, sql, hash);
}
