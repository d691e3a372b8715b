/* The whole of a draft in one call: successors' embeddings joined with hidden states, the MTP layer over them, and what
 * it says about the tokens after them. Small models spend as long between calls as in them. */
#ifndef TRIPOOL_DRAFT_H
#define TRIPOOL_DRAFT_H

#include "experts.h"
#include "latent.h"
#include "layers.h"

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
    const float *embed; /* [vocab, hidden] */
    const float *turns; /* [positions, turn_width] */
    int32_t turn_width;
    const Join *join;
    const Mla *mla; /* one of the two */
    const Gqa *gqa;
    const Moe *moe; /* one of the two */
    const Mlp *mlp;
    Norm norm;
    Weight head;
} Draft;

/* Where the rows of some spans turn; a span's rows count from `first`. */
static void gather_turns(const Draft *d, const Span *spans, int count, int first, float *turns) {
    const size_t width = (size_t)d->turn_width;
    for (int i = 0; i < count; i++)
        memcpy(turns + (size_t)(first + spans[i].row) * width, d->turns + (size_t)spans[i].start * width,
               sizeof(float) * width * (size_t)spans[i].count);
}

/* The layer over all rows; x is what they become. */
static void draft_layer(const Draft *d, float *x, float *kv, const Batch *b) {
    if (d->mla) mla(d->mla, x, kv, b);
    else gqa(d->gqa, x, kv, b);
    if (d->moe) moe(d->moe, x, b->rows);
    else mlp(d->mlp, x, b->rows);
}

/* The batch of some of its rows, rising, each a span of its own; x and the turns move up with them. */
static Batch some_rows(const Draft *d, const Batch *b, const int32_t *wanted, int count, float *x, float *turns) {
    const size_t width = (size_t)d->norm.width, turn_width = (size_t)d->turn_width;
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

/* y: logits of the `wanted` rows; or, with `count` below 0, the final hidden state of every row. `kv`: of this layer.
 * All rows leave their KV; nobody needs more of those that are not wanted. */
static void draft(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *batch,
                  const int32_t *wanted, int count, float *y) {
    const size_t width = (size_t)d->norm.width, rows = (size_t)batch->rows;
    float *x = room(STREAM, sizeof(float) * rows * (2 * width + (size_t)d->turn_width));
    float *embedded = x + rows * width, *turns = embedded + rows * width;
    for (size_t row = 0; row < rows; row++)
        memcpy(embedded + row * width, d->embed + (size_t)tokens[row] * width, sizeof(float) * width);
    gather_turns(d, batch->prompt, batch->prompts, 0, turns);
    gather_turns(d, batch->decode, batch->decodes, batch->prompt_rows, turns);
    Batch b = *batch;
    b.turns = turns;
    join(d->join, embedded, hidden, x, (int)rows);
    if (count < 0) {
        draft_layer(d, x, kv, &b);
        for (size_t row = 0; row < rows; row++) normalise(x + row * width, &d->norm, y + row * width);
        return;
    }
    if ((size_t)count < rows) {
        if (d->mla) mla_place(d->mla, x, kv, &b);
        else gqa_place(d->gqa, x, kv, &b);
        b = some_rows(d, batch, wanted, count, x, turns);
    }
    if (!count) return;
    draft_layer(d, x, kv, &b);
    const Rows input = prepared(INPUT, x, width, count, (int)width, &d->norm);
    product((Product){&d->head, &input, NULL, count, y, (size_t)d->head.out, 0, STORE, NULL, 0});
}

#endif
