/* The pure rules of the queue: see policy.h. */
#include "core/policy.h"

static bool is_space(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f';
}

static bool is_letter(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

static bool is_topic_char(char c)
{
	return is_letter(c) || is_digit(c) || c == '.' || c == '_' || c == '-' || c == ':';
}

int mill_policy_topic(const char *text, size_t len, const char **start, size_t *trimmed_len,
                      struct mill_err *err)
{
	const char *begin = text, *end = text + len;
	while (begin < end && is_space(*begin))
		begin++;
	while (end > begin && is_space(end[-1]))
		end--;
	size_t n = (size_t)(end - begin);
	if (n > MILL_TOPIC_MAX)
		return mill_err_set(
		        err, MILL_ERR_INPUT,
		        "`%.40s…` is not a topic: it has %zu characters, at most %d are allowed",
		        begin, n, MILL_TOPIC_MAX);
	bool good = n > 0;
	for (const char *c = begin; good && c < end; c++)
		good = is_topic_char(*c);
	if (!good) {
		char *shown = mill_policy_clean_text(begin, n, MILL_TOPIC_MAX);
		mill_err_set(err, MILL_ERR_INPUT,
		             "`%s` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
		             shown);
		free(shown);
		return -1;
	}
	*start = begin;
	*trimmed_len = n;
	return 0;
}

uint32_t mill_policy_backoff_secs(uint32_t base_secs, uint32_t attempts, double jitter,
                                  double random)
{
	uint64_t secs = base_secs;
	for (uint32_t i = 1; i < attempts && secs > 0 && secs < MILL_BACKOFF_MAX_SECS; i++)
		secs *= 2;
	if (secs > MILL_BACKOFF_MAX_SECS)
		secs = MILL_BACKOFF_MAX_SECS;
	if (jitter > 0)
		secs += (uint64_t)((double)secs * jitter * random);
	return (uint32_t)secs;
}

size_t mill_policy_boundary(const char *text, size_t len, size_t max)
{
	if (len <= max)
		return len;
	size_t end = max;
	while (end > 0 && ((unsigned char)text[end] & 0xC0) == 0x80)
		end--;
	return end;
}

/*
 * The length of the valid UTF-8 sequence at `text`, or 0: overlong forms, surrogates and what lies
 * above U+10FFFF are invalid, as they are to Postgres.
 */
static size_t utf8_sequence(const unsigned char *text, size_t len)
{
	unsigned char lead = text[0];
	if (lead < 0x80)
		return lead == 0 ? 0 : 1;
	size_t n;
	unsigned char low = 0x80, high = 0xBF; /* bounds of the second byte */
	if (lead >= 0xC2 && lead <= 0xDF) {
		n = 2;
	} else if (lead >= 0xE0 && lead <= 0xEF) {
		n = 3;
		if (lead == 0xE0)
			low = 0xA0;
		if (lead == 0xED)
			high = 0x9F;
	} else if (lead >= 0xF0 && lead <= 0xF4) {
		n = 4;
		if (lead == 0xF0)
			low = 0x90;
		if (lead == 0xF4)
			high = 0x8F;
	} else {
		return 0;
	}
	if (len < n || text[1] < low || text[1] > high)
		return 0;
	for (size_t i = 2; i < n; i++)
		if ((text[i] & 0xC0) != 0x80)
			return 0;
	return n;
}

char *mill_policy_clean_text(const char *text, size_t len, size_t max)
{
	static const char replacement[] = "\xEF\xBF\xBD", ellipsis[] = "\xE2\x80\xA6";
	/* Every byte may become a replacement of three; what lies past `max` only needs to be
	 * noticed. */
	size_t room = len < max ? len : max;
	char *out = mill_alloc(room * 3 + sizeof(ellipsis) + 4);
	size_t at = 0, n = 0;
	while (at < len && n <= max) {
		size_t step = utf8_sequence((const unsigned char *)text + at, len - at);
		if (step == 0) {
			memcpy(out + n, replacement, 3);
			n += 3;
			at += 1;
		} else {
			memcpy(out + n, text + at, step);
			n += step;
			at += step;
		}
	}
	if (n > max) {
		n = mill_policy_boundary(out, n, max);
		memcpy(out + n, ellipsis, 3);
		n += 3;
	}
	out[n] = '\0';
	return out;
}

bool mill_policy_identifier(const char *name, size_t max)
{
	size_t n = strlen(name);
	if (n == 0 || n > max || is_digit(name[0]))
		return false;
	for (size_t i = 0; i < n; i++)
		if (!is_letter(name[i]) && !is_digit(name[i]) && name[i] != '_')
			return false;
	return true;
}

char *mill_policy_quote_identifier(const char *name)
{
	MILL_ASSERT(mill_policy_identifier(name, MILL_IDENTIFIER_MAX));
	return mill_sprintf("\"%s\"", name);
}

#define WORD_MAX 40
#define PREFIX_MIN 3

static size_t least(size_t a, size_t b)
{
	return a < b ? a : b;
}

/* How many single slips of the fingers lie between two words; two letters swapped are one. */
static size_t slips(const char *a, const char *b)
{
	size_t n = strlen(a), m = strlen(b);
	size_t rows[WORD_MAX + 1][WORD_MAX + 1];
	if (n > WORD_MAX || m > WORD_MAX)
		return SIZE_MAX;
	for (size_t i = 0; i <= n; i++)
		for (size_t j = 0; j <= m; j++) {
			if (i == 0 || j == 0) {
				rows[i][j] = i + j;
				continue;
			}
			size_t best = rows[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
			best = least(best, 1 + least(rows[i - 1][j], rows[i][j - 1]));
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				best = least(best, 1 + rows[i - 2][j - 2]);
			rows[i][j] = best;
		}
	return rows[n][m];
}

/* The first that begins with the word, unless that is hardly one. */
static const char *longer(const char *word, const char *const *names, size_t count)
{
	size_t len = strlen(word);
	if (len < PREFIX_MIN || len > WORD_MAX)
		return NULL;
	for (size_t i = 0; i < count; i++)
		if (strncmp(names[i], word, len) == 0)
			return names[i];
	return NULL;
}

const char *mill_policy_closest(const char *word, const char *const *names, size_t count)
{
	const char *best = NULL;
	size_t fewest = SIZE_MAX;
	for (size_t i = 0; i < count; i++) {
		size_t found = slips(word, names[i]);
		if (found < fewest) {
			fewest = found;
			best = names[i];
		}
	}
	if (fewest <= 1 + strlen(word) / 4)
		return best;
	return longer(word, names, count);
}
