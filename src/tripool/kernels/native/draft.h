/* The MTP layer in one call: joins embeddings with hidden states, runs the layer, and returns logits or samples. Small
 * models spend as much time between calls as in them. */
#ifndef TRIPOOL_DRAFT_H
#define TRIPOOL_DRAFT_H

#include "stack.h"

typedef struct {
    Norm left, right;
    Weight weight;
} Join;

/* Projects the concatenation of two normed rows to one. */
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

/* A batch of selected rows, in rising order, each as a sequence of its own; compacts x and cos_sin accordingly. */
static Batch some_rows(const Draft *d, const Batch *b, const int32_t *wanted, int count, float *x, float *cos_sin) {
    const size_t width = (size_t)d->norm.width, rope_width = (size_t)d->entry.rope_width;
    char *memory = room(SOME, (sizeof(SequenceRows) + sizeof(int64_t)) * (size_t)(count + 1));
    SequenceRows *seqs = (SequenceRows *)memory;
    int64_t *slot_mapping = (int64_t *)(seqs + count + 1);
    Batch some = {.rows = count, .slot_mapping = slot_mapping, .cos_sin = cos_sin, .context = b->context};
    const SequenceRows *prompts = b->prompt, *decodes = b->decode;
    for (int i = 0; i < count; i++) {
        const int row = wanted[i], prompt = row < b->prompt_rows, at = prompt ? row : row - b->prompt_rows;
        const SequenceRows **of = prompt ? &prompts : &decodes;
        while (at >= (*of)->row + (*of)->count) ++*of;
        const int position = (*of)->start + at - (*of)->row;
        seqs[i] = (SequenceRows){prompt ? i : i - some.prompt_rows, 1, position, (*of)->first, (*of)->block_table};
        some.prompt_rows += prompt;
        slot_mapping[i] = b->slot_mapping[row];
        if (row == i) continue; /* rows are in rising order, so none is overwritten before it is read */
        memcpy(x + (size_t)i * width, x + (size_t)row * width, sizeof(float) * width);
        memcpy(cos_sin + (size_t)i * rope_width, cos_sin + (size_t)row * rope_width, sizeof(float) * rope_width);
    }
    some.prompts = some.prompt_rows;
    some.decodes = count - some.prompt_rows;
    some.prompt = seqs;
    some.decode = seqs + some.prompts;
    return some;
}

/* Runs the layer over the `wanted` rows of x, which are compacted; the other rows only write their KV. */
static void some_of_layer(const Draft *d, float *x, float *kv, const Batch *b, const int32_t *wanted, int count,
                          float *cos_sin) {
    const Layer *l = &d->layer;
    if (l->mla) {
        const MlaWork w = mla_write_kv(l->mla, x, kv, b);
        if (!count) return;
        const Batch some = some_rows(d, b, wanted, count, x, cos_sin);
        mla_attend(w, x, &some, wanted);
    } else {
        gqa_write_kv(l->gqa, x, kv, b);
        if (!count) return;
        const Batch some = some_rows(d, b, wanted, count, x, cos_sin);
        gqa(l->gqa, x, kv, &some);
    }
    feed_forward(l, x, count);
}

/* y: logits of the `wanted` rows; or, with `count` below 0, the final hidden state of every row. `kv`: of this
 * layer. */
static void draft(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *batch,
                  const int32_t *wanted, int count, float *y) {
    const size_t width = (size_t)d->norm.width, rows = (size_t)batch->rows;
    float *x = room(STREAM, sizeof(float) * rows * 2 * width), *embedded = x + rows * width, *cos_sin;
    Batch b = with_slot_mapping(&d->entry, batch, &cos_sin);
    embed_rows(&d->entry, tokens, (int)rows, embedded);
    join(d->join, embedded, hidden, x, (int)rows);
    if (count < 0 || (size_t)count == rows) layer_rows(&d->layer, x, kv, &b);
    else some_of_layer(d, x, kv, &b, wanted, count, cos_sin);
    if (count < 0) {
        for (size_t row = 0; row < rows; row++) normalise(x + row * width, &d->norm, y + row * width);
        return;
    }
    if (!count) return;
    const Rows input = prepared(INPUT, x, width, count, (int)width, &d->norm);
    product((Product){&d->head, &input, NULL, count, y, (size_t)d->head.out, 0, STORE, NULL, 0});
}

/* One decode piece of one sequence: runs its step and then, with the sampled tokens, the draft of the next token.
 * The second row, if there is one, is the previous draft; it is accepted if the first row samples the same token.
 * `draws`: of three tokens, starting after the first row; the new draft, the second or the third, goes to chosen[2].
 * The MTP layer's KV is the layer after the stack's. */
static void step_and_guess(const Stack *s, const Draft *d, const int64_t *tokens, float *kv, size_t layer_floats,
                           const Batch *batch, const Draws *draws) {
    float *hidden = room(FINAL, sizeof(float) * (size_t)batch->rows * s->norm.width);
    step(s, tokens, kv, layer_floats, batch, draws, hidden);
    const int accepted = batch->rows == 2 && draws->chosen[0] == tokens[1];
    const int64_t next[2] = {draws->chosen[0], accepted ? draws->chosen[1] : 0};
    const SequenceRows after = {0, 1 + accepted, batch->decode->start + 1, 1, batch->decode->block_table};
    const Batch follow = {.rows = 1 + accepted, .decodes = 1, .prompt = &after, .decode = &after, .context = stop_of(&after)};
    const int32_t last = accepted;
    const Draws guess = {&last, draws->temperature + 1 + accepted, draws->key + 1 + accepted, draws->chosen + 2, 1};
    float *logits = room(LOGITS, sizeof(float) * (size_t)d->head.out);
    draft(d, next, hidden, kv + (size_t)s->layers * layer_floats, &follow, &last, 1, logits);
    choose_all(&guess, logits, d->head.out);
}

#endif
