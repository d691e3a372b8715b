/* A whole step in one call: from tokens to final states and to sampled tokens.
 *
 * A step streams every weight through the caches, which evicts the interpreter's memory. Returning to Python between
 * layers would cost small models as much time as the layers. */
#ifndef TRIPOOL_STACK_H
#define TRIPOOL_STACK_H

#include "draw.h"
#include "microbatch.h"
#include "prompt.h"

static void feed_forward(const Layer *l, float *x, int rows) {
    if (l->moe) feed_experts(l->moe, x, rows);
    else mlp(l->mlp, x, rows);
}

/* Runs the layer over all rows of x. `kv`: of this layer. */
static void layer_rows(const Layer *l, float *x, float *kv, const Batch *b) {
    serve_others(l->moe);
    if (l->mla) mla(l->mla, x, kv, b);
    else gqa(l->gqa, x, kv, b);
    serve_others(l->moe);
    feed_forward(l, x, b->rows);
}

static void embed_rows(const Entry *e, const int64_t *tokens, int rows, float *x) {
    const size_t width = (size_t)e->width;
    for (int row = 0; row < rows; row++)
        memcpy(x + row * width, e->embed + (size_t)tokens[row] * width, sizeof(float) * width);
}

static void fill_slot_mapping(const Entry *e, const SequenceRows *seqs, int count, int first, int64_t *slot_mapping,
                              float *cos_sin) {
    const size_t width = (size_t)e->rope_width;
    for (int i = 0; i < count; i++) {
        const SequenceRows *s = &seqs[i];
        const size_t row = (size_t)(first + s->row);
        memcpy(cos_sin + row * width, e->cos_sin + (size_t)s->start * width, sizeof(float) * width * (size_t)s->count);
        for (int j = 0; j < s->count; j++)
            slot_mapping[row + j] = (int64_t)s->block_table[(s->start + j) / BLOCK] * BLOCK + (s->start + j) % BLOCK;
    }
}

/* Copies the batch and adds slot mapping and rotary embeddings, computed from its sequences. See also `draft.h`. */
static Batch with_slot_mapping(const Entry *e, const Batch *batch, float **cos_sin) {
    const size_t rows = (size_t)batch->rows;
    int64_t *slot_mapping = room(SLOT_MAPPING, rows * (sizeof(int64_t) + sizeof(float) * (size_t)e->rope_width));
    *cos_sin = (float *)(slot_mapping + rows);
    fill_slot_mapping(e, batch->prompt, batch->prompts, 0, slot_mapping, *cos_sin);
    fill_slot_mapping(e, batch->decode, batch->decodes, batch->prompt_rows, slot_mapping, *cos_sin);
    Batch b = *batch;
    b.slot_mapping = slot_mapping;
    b.cos_sin = *cos_sin;
    return b;
}

/* How a token is sampled after each of `count` rows: argmax at temperature 0, else a draw. */
typedef struct {
    const int32_t *row; /* of the batch */
    const float *temperature;
    const uint64_t *key;
    int32_t *chosen;
    int64_t count;
} Draws;

typedef struct {
    const Draws *draws;
    const float *logits;
    int width;
} Choose;

static void choose_chunk(void *arguments, int i, int thread) {
    (void)thread;
    const Choose *c = arguments;
    const Draws *d = c->draws;
    const float *logits = c->logits + (size_t)i * c->width, temperature = d->temperature[i];
    d->chosen[i] = temperature == 0.0f ? largest(logits, c->width) : draw(logits, c->width, temperature, d->key[i]);
}

/* Samples from the logits of the rows, one after the other. */
static void choose_all(const Draws *d, const float *logits, int width) {
    in_parallel((int)d->count, choose_chunk, &(Choose){d, logits, width});
}

static void all_layers(const Stack *s, const int64_t *tokens, float *kv, size_t layer_floats, const Batch *batch, float *x,
                       float *hidden) {
    const size_t width = (size_t)s->norm.width, rows = (size_t)batch->rows;
    float *cos_sin;
    const Batch b = with_slot_mapping(&s->entry, batch, &cos_sin);
    embed_rows(&s->entry, tokens, (int)rows, x);
    if (microbatches_pay(s, &b)) layers_in_two(s, &b, x, kv, layer_floats);
    else
        for (int64_t i = 0; i < s->layers; i++) layer_rows(&s->layer[i], x, kv + (size_t)i * layer_floats, &b);
    for (size_t row = 0; row < rows; row++) normalise(x + row * width, &s->norm, hidden + row * width);
}

/* `hidden`: normed final states of all rows. `kv`: [layers, layer_floats]. */
static void step(const Stack *s, const int64_t *tokens, float *kv, size_t layer_floats, const Batch *batch,
                 const Draws *draws, float *hidden) {
    const size_t width = (size_t)s->norm.width, rows = (size_t)batch->rows, count = (size_t)draws->count;
    float *x = room(STREAM, sizeof(float) * rows * width);
    if (prompts_pay(s, batch)) prompts_step(s, tokens, kv, layer_floats, batch, hidden);
    else all_layers(s, tokens, kv, layer_floats, batch, x, hidden);
    if (!count) return;
    float *wanted = x; /* the residual stream is free now, and no row is wanted twice */
    for (size_t i = 0; i < count; i++)
        memcpy(wanted + i * width, hidden + (size_t)draws->row[i] * width, sizeof(float) * width);
    const Rows input = prepared(INPUT, wanted, width, (int)count, (int)width, NULL);
    float *logits = room(LOGITS, sizeof(float) * count * (size_t)s->head.out);
    product((Product){&s->head, &input, NULL, (int)count, logits, (size_t)s->head.out, 0, STORE, NULL, 0});
    choose_all(draws, logits, s->head.out);
}

#endif
