/* The whole of a draft in one call: successors' embeddings joined with hidden states, the MTP layer over them, and what
 * it says about the tokens after them. Small models spend as long between calls as in them. */
#ifndef TRIPOOL_DRAFT_H
#define TRIPOOL_DRAFT_H

#include "stack.h"

typedef struct {
    Norm left, right;
    Weight weight;
} Join;

/* Two rows, each normed, side by side, into one. */
static void join(const Join *j, const float *left, const float *right, float *y, int rows) {
    const size_t a = (size_t)j->left.width, b = (size_t)j->right.width;
    float *both = room(HIDDEN, sizeof(float) * (size_t)rows * (a + b));
    for (int row = 0; row < rows; row++) {
        normalise(left + row * a, &j->left, both + row * (a + b));
        normalise(right + row * b, &j->right, both + row * (a + b) + a);
    }
    const Rows input = prepared(INPUT, both, a + b, rows, (int)(a + b), NULL);
    product((Product){&j->weight, &input, NULL, rows, y, (size_t)j->weight.out, 0, STORE, NULL, 0});
}

typedef struct {
    Entry entry;
    const Join *join;
    Layer layer;
    Norm norm;
    Weight head;
} Draft;

/* The batch of some of its rows, rising, each a span of its own; x and the turns move up with them. */
static Batch some_rows(const Draft *d, const Batch *b, const int32_t *wanted, int count, float *x, float *turns) {
    const size_t width = (size_t)d->norm.width, turn_width = (size_t)d->entry.turn_width;
    char *memory = room(SOME, (sizeof(Span) + sizeof(int64_t)) * (size_t)(count + 1));
    Span *spans = (Span *)memory;
    int64_t *slots = (int64_t *)(spans + count + 1);
    Batch some = {.rows = count, .slots = slots, .turns = turns, .context = b->context};
    const Span *prompts = b->prompt, *decodes = b->decode;
    for (int i = 0; i < count; i++) {
        const int row = wanted[i], prompt = row < b->prompt_rows, at = prompt ? row : row - b->prompt_rows;
        const Span **of = prompt ? &prompts : &decodes;
        while (at >= (*of)->row + (*of)->count) ++*of;
        const int position = (*of)->start + at - (*of)->row;
        spans[i] = (Span){prompt ? i : i - some.prompt_rows, 1, position, (*of)->first, (*of)->table};
        some.prompt_rows += prompt;
        slots[i] = b->slots[row];
        if (row == i) continue; /* rows are in order: none is overwritten before it is read */
        memcpy(x + (size_t)i * width, x + (size_t)row * width, sizeof(float) * width);
        memcpy(turns + (size_t)i * turn_width, turns + (size_t)row * turn_width, sizeof(float) * turn_width);
    }
    some.prompts = some.prompt_rows;
    some.decodes = count - some.prompt_rows;
    some.prompt = spans;
    some.decode = spans + some.prompts;
    return some;
}

/* The layer over the `wanted` rows of x, which move up; the others only leave their KV. */
static void some_of_layer(const Draft *d, float *x, float *kv, const Batch *b, const int32_t *wanted, int count,
                          float *turns) {
    const Layer *l = &d->layer;
    if (l->mla) {
        const MlaWork w = mla_place(l->mla, x, kv, b);
        if (!count) return;
        const Batch some = some_rows(d, b, wanted, count, x, turns);
        mla_attend(w, x, &some, wanted);
    } else {
        gqa_place(l->gqa, x, kv, b);
        if (!count) return;
        const Batch some = some_rows(d, b, wanted, count, x, turns);
        gqa(l->gqa, x, kv, &some);
    }
    feed_forward(l, x, count);
}

/* y: logits of the `wanted` rows; or, with `count` below 0, the final hidden state of every row. `kv`: of this layer. */
static void draft(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *batch,
                  const int32_t *wanted, int count, float *y) {
    const size_t width = (size_t)d->norm.width, rows = (size_t)batch->rows;
    float *x = room(STREAM, sizeof(float) * rows * 2 * width), *embedded = x + rows * width, *turns;
    Batch b = placed(&d->entry, batch, &turns);
    embed_rows(&d->entry, tokens, (int)rows, embedded);
    join(d->join, embedded, hidden, x, (int)rows);
    if (count < 0 || (size_t)count == rows) layer_rows(&d->layer, x, kv, &b);
    else some_of_layer(d, x, kv, &b, wanted, count, turns);
    if (count < 0) {
        for (size_t row = 0; row < rows; row++) normalise(x + row * width, &d->norm, y + row * width);
        return;
    }
    if (!count) return;
    const Rows input = prepared(INPUT, x, width, count, (int)width, &d->norm);
    product((Product){&d->head, &input, NULL, count, y, (size_t)d->head.out, 0, STORE, NULL, 0});
}

/* One decode span of one sequence: its step, and then, with what that has said, the draft of what follows. Its second
 * row, if there is one, is the last draft: it counts if the first row says the same. `draws`: of three tokens, the first
 * ones after the rows; the new draft, which is the second or the third, goes to chosen[2]. The MTP layer's KV is the one
 * after the stack's. */
static void step_and_guess(const Stack *s, const Draft *d, const int64_t *tokens, float *kv, size_t layer_floats,
                           const Batch *batch, const Draws *draws) {
    float *hidden = room(FINAL, sizeof(float) * (size_t)batch->rows * s->norm.width);
    step(s, tokens, kv, layer_floats, batch, draws, hidden);
    const int right = batch->rows == 2 && draws->chosen[0] == tokens[1];
    const int64_t next[2] = {draws->chosen[0], right ? draws->chosen[1] : 0};
    const Span after = {0, 1 + right, batch->decode->start + 1, 1, batch->decode->table};
    const Batch follow = {.rows = 1 + right, .decodes = 1, .prompt = &after, .decode = &after, .context = stop_of(&after)};
    const int32_t last = right;
    const Draws guess = {&last, draws->temperature + 1 + right, draws->key + 1 + right, draws->chosen + 2, 1};
    float *logits = room(LOGITS, sizeof(float) * (size_t)d->head.out);
    draft(d, next, hidden, kv + (size_t)s->layers * layer_floats, &follow, &last, 1, logits);
    choose_all(&guess, logits, d->head.out);
}

#endif
