/* Answers to statements of handlers and scripts: see answer.h. */
#include "pg/answer.h"

#include <libpq-fe.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/err.h"

static void clear_rows(struct mill_answer *answer)
{
	for (size_t i = 0; i < answer->field_count; i++)
		free(answer->fields[i].name);
	free(answer->fields);
	mill_buffer_free(&answer->rows);
	answer->fields = NULL;
	answer->field_count = answer->row_count = answer->json_size = 0;
	answer->affected = 0;
	answer->tag[0] = '\0';
}

void mill_answer_clear(struct mill_answer *answer)
{
	struct mill_failure *failure = &answer->failure;
	clear_rows(answer);
	free(failure->message);
	free(failure->detail);
	free(failure->hint);
	free(failure->constraint);
	free(failure->schema);
	free(failure->table);
	free(failure->column);
	*answer = (struct mill_answer){ 0 };
}

/* ---- failures ------------------------------------------------------------------------------ */

/* The first failure counts: what follows is mostly its consequence. */
static bool begin_failure(struct mill_answer *answer)
{
	if (answer->failed)
		return false;
	clear_rows(answer);
	answer->failed = true;
	return true;
}

void mill_answer_fail(struct mill_answer *answer, const char *sqlstate, const char *format, ...)
{
	if (!begin_failure(answer))
		return;
	struct mill_err text;
	char message[sizeof(text.message)];
	va_list args;
	va_start(args, format);
	vsnprintf(message, sizeof(message), format, args);
	va_end(args);
	/* One line, cut on a boundary. */
	mill_err_database(&text, sqlstate, "%s", message);
	memcpy(answer->failure.sqlstate, text.sqlstate, sizeof(text.sqlstate));
	answer->failure.message = mill_strdup(text.message);
}

/* What libpq itself says of a loss: its first line, the rest is guesses. */
static char *loss_text(const char *said)
{
	int len = (int)strcspn(said, "\n");
	return mill_sprintf("the connection to the database was lost%s%.*s", len ? ": " : "", len,
	                    said);
}

void mill_answer_lost(struct mill_answer *answer, const PGconn *connection)
{
	char *text = loss_text(connection ? PQerrorMessage(connection) : "");
	mill_answer_fail(answer, NULL, "%s", text);
	answer->failure.lost = true;
	free(text);
}

void mill_answer_unknown(struct mill_answer *answer)
{
	struct mill_failure *failure = &answer->failure;
	char *longer =
	        mill_sprintf("%s (whether the statement took effect is unknown)", failure->message);
	free(failure->message);
	failure->message = longer;
	failure->unknown = true;
}

static char *field_of(const PGresult *result, int code)
{
	const char *text = PQresultErrorField(result, code);
	return text ? mill_strdup(text) : NULL;
}

/* What the server says in terms of its protocol. */
static void add_hint(struct mill_failure *failure)
{
	static const struct {
		const char *sqlstate, *words, *hint;
	} hints[] = {
		{ "42601", "multiple commands",
		  "give one statement at a time, several of them in a transaction where they "
		  "belong together" },
		{ "08P01", "bind message supplies",
		  "the statement has not as many places ($1 …) as there are arguments" },
	};
	for (size_t i = 0; i < MILL_COUNT(hints); i++)
		if (failure->hint == NULL && strcmp(failure->sqlstate, hints[i].sqlstate) == 0 &&
		    strstr(failure->message, hints[i].words) != NULL)
			failure->hint = mill_strdup(hints[i].hint);
}

void mill_answer_refuse(struct mill_answer *answer, const PGresult *result)
{
	if (!begin_failure(answer))
		return;
	struct mill_failure *failure = &answer->failure;
	const char *sqlstate = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	failure->message = field_of(result, PG_DIAG_MESSAGE_PRIMARY);
	if (failure->message == NULL)
		failure->message = loss_text(PQresultErrorMessage(result));
	snprintf(failure->sqlstate, sizeof(failure->sqlstate), "%s", sqlstate ? sqlstate : "");
	failure->detail = field_of(result, PG_DIAG_MESSAGE_DETAIL);
	failure->hint = field_of(result, PG_DIAG_MESSAGE_HINT);
	failure->constraint = field_of(result, PG_DIAG_CONSTRAINT_NAME);
	failure->schema = field_of(result, PG_DIAG_SCHEMA_NAME);
	failure->table = field_of(result, PG_DIAG_TABLE_NAME);
	failure->column = field_of(result, PG_DIAG_COLUMN_NAME);
	add_hint(failure);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static void take_fields(struct mill_answer *answer, const PGresult *result)
{
	if (answer->fields != NULL)
		return;
	size_t count = (size_t)PQnfields(result);
	answer->fields = mill_calloc(count + 1, sizeof(answer->fields[0]));
	answer->field_count = count;
	for (size_t i = 0; i < count; i++) {
		answer->fields[i].name = mill_strdup(PQfname(result, (int)i));
		answer->fields[i].type = PQftype(result, (int)i);
	}
}

static bool is_json(uint32_t type)
{
	return type == MILL_ANSWER_JSON || type == MILL_ANSWER_JSONB;
}

static bool is_too_large(const struct mill_answer *answer)
{
	size_t row = MILL_ANSWER_TABLE + answer->field_count * MILL_ANSWER_VALUE;
	return answer->rows.len + answer->json_size + answer->row_count * row > MILL_ANSWER_MAX;
}

/* Not less than there is: what stands in a text counts as if it were JSON's own. */
static size_t json_size(struct mill_span text)
{
	size_t tables = 0, values = 0;
	for (size_t i = 0; i < text.len; i++) {
		tables += text.data[i] == '[' || text.data[i] == '{';
		values += text.data[i] == ',';
	}
	return tables * (MILL_ANSWER_TABLE + MILL_ANSWER_VALUE) + values * MILL_ANSWER_VALUE;
}

static int take_rows(struct mill_answer *answer, const PGresult *result)
{
	int rows = PQntuples(result);
	take_fields(answer, result);
	for (int row = 0; row < rows; row++) {
		for (int i = 0; i < (int)answer->field_count; i++) {
			struct mill_span value = MILL_SPAN_NONE;
			if (!PQgetisnull(result, row, i)) {
				value.data = PQgetvalue(result, row, i);
				value.len = (size_t)PQgetlength(result, row, i);
			}
			mill_write_span(&answer->rows, value);
			if (is_json(answer->fields[i].type))
				answer->json_size += json_size(value);
		}
		answer->row_count++;
		if (!is_too_large(answer))
			continue;
		mill_answer_fail(answer, NULL,
		                 "the result is larger than %d bytes, the most one query may "
		                 "return: select less, or in portions (each row counts %d bytes, "
		                 "each value in it %d and its text, and JSON likewise)",
		                 MILL_ANSWER_MAX, MILL_ANSWER_TABLE, MILL_ANSWER_VALUE);
		return -1;
	}
	return 0;
}

static void take_end(struct mill_answer *answer, PGresult *result)
{
	answer->affected = strtoll(PQcmdTuples(result), NULL, 10);
	snprintf(answer->tag, sizeof(answer->tag), "%s", PQcmdStatus(result));
}

int mill_answer_take(struct mill_answer *answer, PGresult *result)
{
	int outcome = 0;
	switch (PQresultStatus(result)) {
	case PGRES_SINGLE_TUPLE:
		outcome = answer->failed ? 0 : take_rows(answer, result);
		break;
	case PGRES_TUPLES_OK:
		outcome = answer->failed ? 0 : take_rows(answer, result);
		if (!answer->failed)
			take_end(answer, result);
		break;
	case PGRES_COMMAND_OK:
		if (!answer->failed)
			take_end(answer, result);
		break;
	case PGRES_EMPTY_QUERY:
		mill_answer_fail(answer, NULL, "there is no statement in this SQL text");
		break;
	case PGRES_COPY_IN:
	case PGRES_COPY_OUT:
	case PGRES_COPY_BOTH:
		mill_answer_fail(answer, NULL,
		                 "COPY from or to the client is not possible here: use insert and "
		                 "select");
		outcome = -1;
		break;
	default:
		mill_answer_refuse(answer, result);
		break;
	}
	PQclear(result);
	return outcome;
}
