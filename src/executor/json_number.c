/* JSON numbers without loss: see json_number.h. */
#include "executor/json_number.h"

#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>

#define DOUBLE_DIGITS 17 /* no double needs more digits to be told from its neighbours */
#define WHOLE_MAX (UINT64_C(1) << 53) /* up to here every whole number is a double */
#define EXPONENT_DIGITS 15

/* Powers of ten that are doubles without rounding. */
static const double power_of_ten[] = { 1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
	                               1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
	                               1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22 };
#define POWERS ((int)MILL_COUNT(power_of_ten))
#define FEW_DECIMALS 8

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* ---- reading --------------------------------------------------------------------------- */

size_t mill_number_scan(const char *text, size_t len, struct mill_number *number, size_t *bad_at)
{
	const char *at = text, *end = text + len;
	*number = (struct mill_number){ 0 };
	*bad_at = 0;
	if (at < end && *at == '-') {
		number->negative = true;
		at++;
	}
	const char *whole = at;
	while (at < end && is_digit(*at))
		at++;
	const char *point = at, *digits_end = at;
	if (point == whole || (*whole == '0' && point - whole > 1)) {
		*bad_at = (size_t)((point == whole ? point : whole + 1) - text);
		return 0;
	}
	if (at < end && *at == '.') {
		const char *fraction = ++at;
		while (at < end && is_digit(*at))
			at++;
		if (at == fraction) {
			*bad_at = (size_t)(at - text);
			return 0;
		}
		digits_end = at;
	}
	int64_t exponent = 0;
	if (at < end && (*at == 'e' || *at == 'E')) {
		at++;
		bool negative = at < end && *at == '-';
		if (at < end && (*at == '-' || *at == '+'))
			at++;
		const char *written = at;
		while (at < end && *at == '0')
			at++;
		const char *significant = at;
		while (at < end && is_digit(*at) && at - significant <= EXPONENT_DIGITS)
			exponent = exponent * 10 + (*at++ - '0');
		if (at == written || at - significant > EXPONENT_DIGITS) {
			*bad_at = (size_t)(written - text);
			return 0;
		}
		if (negative)
			exponent = -exponent;
	}

	const char *first = whole, *last = digits_end;
	while (first < last && (*first == '0' || *first == '.'))
		first++;
	while (last > first && (last[-1] == '0' || last[-1] == '.'))
		last--;
	if (first < last) {
		bool has_point = first < point && last > point;
		number->first = first;
		number->last = last;
		number->count = (size_t)(last - first) - (has_point ? 1 : 0);
		number->exponent = exponent + (point - first) + (first > point ? 1 : 0);
	}
	return (size_t)(at - text);
}

/* The first `room` digits of the number, the point left out. */
static size_t copy_digits(const struct mill_number *number, char *digits, size_t room)
{
	size_t n = 0;
	for (const char *at = number->first; at < number->last && n < room; at++) {
		if (*at != '.')
			digits[n++] = *at;
	}
	return n;
}

#define READ_DIGITS 801 /* digits past the 800th can only break a tie, which one of them can do */

static locale_t c_locale;

static void open_c_locale(void)
{
	c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
	MILL_ASSERT(c_locale != (locale_t)0);
}

/*
 * The double nearest to digits × 10^exponent. One operation on exact operands rounds once: `digits`
 * must be at most 2^53 and the power in the table.
 */
static double scale(uint64_t digits, int exponent)
{
	double value = (double)digits;
	return exponent < 0 ? value / power_of_ten[-exponent] : value * power_of_ten[exponent];
}

/* The double nearest to DIGITSeEXPONENT, by the rules of the C locale. */
static double read_double(const char *digits, size_t count, int64_t exponent)
{
	if (count <= 15 && exponent > -POWERS && exponent < POWERS) {
		uint64_t whole = 0;
		for (size_t i = 0; i < count; i++)
			whole = whole * 10 + (uint64_t)(digits[i] - '0');
		return scale(whole, (int)exponent);
	}
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, open_c_locale);
	char text[READ_DIGITS + 24];
	memcpy(text, digits, count);
	char *at = text + count;
	*at++ = 'e';
	if (exponent < 0)
		*at++ = '-';
	at += mill_number_write_digits((uint64_t)llabs(exponent), at);
	*at = '\0';
	return strtod_l(text, NULL, c_locale);
}

/* ---- the shortest digits --------------------------------------------------------------- */

struct digits {
	char text[DOUBLE_DIGITS + 1];
	size_t count;
	int exponent; /* the value is 0.TEXT × 10^exponent */
};

/* `value` > 0 rounded to `count` digits, zeros at the end dropped. */
static void round_to(double value, int count, struct digits *digits)
{
	/* D.DDDDe±XX, whatever the locale puts in place of the point: it is no ASCII digit. */
	char text[64];
	snprintf(text, sizeof(text), "%.*e", count - 1, value);
	const char *at = text;
	for (digits->count = 0; *at != 'e'; at++) {
		if (is_digit(*at))
			digits->text[digits->count++] = *at;
	}
	while (digits->count > 1 && digits->text[digits->count - 1] == '0')
		digits->count--;
	digits->exponent = atoi(at + 1) + 1;
}

static bool reads_back(const struct digits *digits, double value)
{
	return read_double(digits->text, digits->count,
	                   digits->exponent - (int64_t)digits->count) == value;
}

/*
 * The same as find_shortest for [1e-6, 1e15), without printf and strtod: there all of it fits into
 * 128-bit integers. With value = m / 2^shift, the digits q are value × 10^places rounded; how far
 * q is off, and half the gap between `value` and its neighbours, are compared times 10^places ×
 * 2^shift. False outside of that range.
 */
#ifdef __SIZEOF_INT128__
static bool find_shortest_whole(double value, struct digits *digits)
{
	typedef unsigned __int128 wide;
	if (!(value >= 1e-6 && value < 1e15))
		return false;
	int exponent;
	uint64_t m = (uint64_t)ldexp(frexp(value, &exponent), 53);
	int shift = 53 - exponent;
	/* See find_shortest on powers of two. */
	bool dense_below = m == UINT64_C(1) << 52;
	/* The digits before the point, or one less. */
	int size = (int)floor((exponent - 1) * 0.30103) + 1;
	for (int count = 15; count <= DOUBLE_DIGITS; count++) {
		int places = count - size;
		if (places < 0 || places >= POWERS)
			return false;
		int rest = places > 11 ? places - 11 : 0;
		wide power =
		        (wide)(uint64_t)power_of_ten[places - rest] * (uint64_t)power_of_ten[rest];
		wide scaled = m * power;
		uint64_t q = (uint64_t)(scaled >> shift);
		if (q >= (uint64_t)power_of_ten[count]) {
			size++;
			count--;
			continue;
		}
		wide below = scaled - ((wide)q << shift), half = (wide)1 << (shift - 1);
		if (below > half || (below == half && q % 2 == 1))
			q++;
		for (int tries = dense_below ? 2 : 1; tries > 0; tries--, q++) {
			wide written = (wide)q << shift;
			wide off = written < scaled ? (scaled - written) * (dense_below ? 4 : 2)
			                            : (written - scaled) * 2;
			bool same = off < power || (off == power && m % 2 == 0);
			if (!same && count < DOUBLE_DIGITS)
				continue;
			char text[20];
			size_t n = mill_number_write_digits(q, text);
			digits->exponent = (int)n - places;
			while (n > 1 && text[n - 1] == '0')
				n--;
			memcpy(digits->text, text, n);
			digits->count = n;
			return true;
		}
	}
	return false;
}
#else
static bool find_shortest_whole(double value, struct digits *digits)
{
	(void)value;
	(void)digits;
	return false;
}
#endif

/*
 * The fewest digits that read back as `value` > 0. A normal double keeps any 15 digits, so that
 * fewer need no try; one near zero has room for less.
 */
static void find_shortest(double value, struct digits *digits)
{
	if (find_shortest_whole(value, digits))
		return;
	for (int count = value < 2.3e-308 ? 1 : 15; count < DOUBLE_DIGITS; count++) {
		round_to(value, count, digits);
		if (reads_back(digits, value))
			return;
	}
	/*
	 * Below a power of two doubles are twice as dense as above it: the nearest 16 digits may be
	 * those below and belong to the neighbour, while the next above still read back.
	 */
	int exponent;
	if (frexp(value, &exponent) == 0.5 && digits->count == 16 && digits->text[15] != '9') {
		digits->text[15]++;
		if (reads_back(digits, value))
			return;
	}
	round_to(value, DOUBLE_DIGITS, digits);
}

/* ---- doubles that keep the value ------------------------------------------------------- */

double mill_number_nearest(const struct mill_number *number)
{
	double value = 0;
	if (number->count > 0 && number->exponent > 400) {
		value = HUGE_VAL;
	} else if (number->count > 0 && number->exponent > -400) {
		char digits[READ_DIGITS];
		size_t n = copy_digits(number, digits, READ_DIGITS - 1);
		if (n < number->count)
			digits[n++] = '1';
		value = read_double(digits, n, number->exponent - (int64_t)n);
	}
	return number->negative ? -value : value;
}

bool mill_number_exact(const struct mill_number *number, double *value)
{
	double found = 0;
	if (number->count > DOUBLE_DIGITS)
		return false;
	if (number->count > 0) {
		if (number->exponent > 309 || number->exponent < -330)
			return false;
		char text[DOUBLE_DIGITS];
		size_t count = copy_digits(number, text, sizeof(text));
		found = read_double(text, count, number->exponent - (int64_t)count);
		if (isinf(found) || found == 0)
			return false;
		struct digits shortest;
		find_shortest(found, &shortest);
		if (shortest.count != count || shortest.exponent != number->exponent ||
		    memcmp(shortest.text, text, count) != 0)
			return false;
	}
	*value = number->negative ? -found : found;
	return true;
}

/*
 * The number at the start of `text` when it is certain to keep its value: at most 15 digits, which
 * a double always keeps, or a whole number up to 2^53; and an exponent so small that one exact
 * operation makes the double. 0 when it is not that simple, or no number.
 */
static size_t read_simple(const char *text, const char *end, double *value)
{
	const char *at = text;
	bool negative = at < end && *at == '-';
	at += negative;
	const char *whole = at;
	uint64_t digits = 0;
	/* 18 digits overflow nothing; where more follow it is given up below. */
	while (at < end && is_digit(*at) && at - whole < 18)
		digits = digits * 10 + (uint64_t)(*at++ - '0');
	ptrdiff_t count = at - whole;
	if (count == 0 || (*whole == '0' && count > 1))
		return 0;
	int exponent = 0;
	if (at < end && *at == '.') {
		const char *fraction = ++at;
		while (at < end && is_digit(*at) && at - fraction < 18 - count)
			digits = digits * 10 + (uint64_t)(*at++ - '0');
		if (at == fraction)
			return 0;
		exponent = -(int)(at - fraction);
		count += at - fraction;
	}
	if (at < end && is_digit(*at))
		return 0;
	bool powered = at < end && (*at == 'e' || *at == 'E');
	if (count > 15 && (exponent < 0 || powered || digits > WHOLE_MAX))
		return 0;
	if (powered) {
		at++;
		bool down = at < end && *at == '-';
		if (at < end && (*at == '-' || *at == '+'))
			at++;
		const char *written = at;
		int power = 0;
		while (at < end && is_digit(*at) && at - written < 4)
			power = power * 10 + (*at++ - '0');
		if (at == written || (at < end && is_digit(*at)))
			return 0;
		exponent += down ? -power : power;
	}
	if (exponent <= -POWERS || exponent >= POWERS)
		return 0;
	double found = scale(digits, exponent);
	*value = negative ? -found : found;
	return (size_t)(at - text);
}

size_t mill_number_read(const char *text, size_t len, double *value, bool *exact, size_t *bad_at)
{
	size_t used = read_simple(text, text + len, value);
	if (used > 0) {
		*exact = true;
		return used;
	}
	struct mill_number number;
	used = mill_number_scan(text, len, &number, bad_at);
	if (used > 0)
		*exact = mill_number_exact(&number, value);
	return used;
}

/* Compares two runs of digits of numbers with the same exponent. */
static int compare_digits(const struct mill_number *a, const struct mill_number *b)
{
	const char *left = a->first, *right = b->first;
	while (left < a->last && right < b->last) {
		if (*left == '.')
			left++;
		if (*right == '.')
			right++;
		if (*left != *right)
			return *left < *right ? -1 : 1;
		left++;
		right++;
	}
	return (left < a->last) - (right < b->last);
}

int mill_number_compare(const struct mill_number *a, const struct mill_number *b)
{
	int left = a->count == 0 ? 0 : a->negative ? -1 : 1;
	int right = b->count == 0 ? 0 : b->negative ? -1 : 1;
	if (left != right)
		return left < right ? -1 : 1;
	if (left == 0)
		return 0;
	int magnitude;
	if (a->exponent != b->exponent)
		magnitude = a->exponent < b->exponent ? -1 : 1;
	else
		magnitude = compare_digits(a, b);
	return left * magnitude;
}

/* ---- writing --------------------------------------------------------------------------- */

size_t mill_number_write_digits(uint64_t value, char *text)
{
	char reversed[20];
	size_t n = 0;
	do {
		reversed[n++] = (char)('0' + value % 10);
		value /= 10;
	} while (value > 0);
	for (size_t i = 0; i < n; i++)
		text[i] = reversed[n - 1 - i];
	return n;
}

/* `digits` with the point `exponent` digits after its start; as D.DDDeX where that would be long.
 */
static size_t place_point(const char *digits, size_t count, int exponent, char *text)
{
	char *at = text;
	if (exponent > 21 || exponent < -5) {
		*at++ = digits[0];
		if (count > 1) {
			*at++ = '.';
			memcpy(at, digits + 1, count - 1);
			at += count - 1;
		}
		*at++ = 'e';
		if (exponent < 1)
			*at++ = '-';
		at += mill_number_write_digits((uint64_t)abs(exponent - 1), at);
	} else if (exponent <= 0) {
		*at++ = '0';
		*at++ = '.';
		memset(at, '0', (size_t)-exponent);
		at += -exponent;
		memcpy(at, digits, count);
		at += count;
	} else if ((size_t)exponent >= count) {
		memcpy(at, digits, count);
		memset(at + count, '0', (size_t)exponent - count);
		at += exponent;
	} else {
		memcpy(at, digits, (size_t)exponent);
		at += exponent;
		*at++ = '.';
		memcpy(at, digits + exponent, count - (size_t)exponent);
		at += count - (size_t)exponent;
	}
	return (size_t)(at - text);
}

/*
 * Prices and the like, `value` > 0 with few decimals: scaled to a whole number, of 15 digits at
 * most, that divided again is the same double. Both operands of the division are exact, so the
 * quotient is the double nearest to the decimal text; and 15 digits are always the shortest. 0 when
 * it fails.
 */
static size_t write_few_decimals(double value, char *text)
{
	for (size_t decimals = 1; decimals <= FEW_DECIMALS; decimals++) {
		double scaled = value * power_of_ten[decimals];
		if (scaled >= 1e15)
			break;
		uint64_t whole = (uint64_t)(scaled + 0.5);
		if (whole == 0 || scale(whole, -(int)decimals) != value)
			continue;
		char digits[20];
		size_t count = mill_number_write_digits(whole, digits);
		return place_point(digits, count, (int)count - (int)decimals, text);
	}
	return 0;
}

size_t mill_number_write(double value, char text[MILL_NUMBER_TEXT])
{
	char *at = text;
	if (signbit(value)) {
		*at++ = '-';
		value = -value;
	}
	if (value <= (double)WHOLE_MAX && value == (double)(uint64_t)value)
		return (size_t)(at - text) + mill_number_write_digits((uint64_t)value, at);
	size_t len = write_few_decimals(value, at);
	if (len == 0) {
		struct digits digits;
		find_shortest(value, &digits);
		len = place_point(digits.text, digits.count, digits.exponent, at);
	}
	return (size_t)(at - text) + len;
}
