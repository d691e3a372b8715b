/* Two microbatches of a step, half of its sequences each: one computes its attention while the other's rows travel.
 *
 * Rows do not depend on each other, so the bits are those of one batch. Both halves read what is no expert's, so this pays
 * only where a half has enough rows for the products, not memory, to take the time. */
#ifndef TRIPOOL_MICROBATCH_H
#define TRIPOOL_MICROBATCH_H

#include "network.h"

typedef struct {
    Batch batch;
    float *x;     /* its rows of the residual stream */
    Flight *sent; /* its rows travel; NULL: they do not */
} Microbatch;

/* Rows of the first half: as near to the middle as sequences allow. Rows of a sequence stay together. */
static int half_of(const Batch *b) {
    int best = 0;
    for (int i = 0; i < b->prompts + b->decodes; i++) {
        const int end = i < b->prompts ? b->prompt[i].row + b->prompt[i].count
                                       : b->prompt_rows + b->decode[i - b->prompts].row + b->decode[i - b->prompts].count;
        if (abs(2 * end - b->rows) < abs(2 * best - b->rows)) best = end;
    }
    return best;
}

/* Whether both halves have rows enough, go into a slab each, and some rank may have other experts than this one. */
static int microbatches_pay(const Stack *s, const Batch *b) {
    const Exchange *x = NULL;
    for (int64_t i = 0; i < s->layers && !x; i++) x = s->layer[i].moe ? s->layer[i].moe->exchange : NULL;
    if (!x || x->at.ranks < 2 || x->at.microbatch_rows < 1 || b->rows < 2 * x->at.microbatch_rows) return 0;
    const int first = half_of(b), second = b->rows - first, less = first < second ? first : second;
    return less >= x->at.microbatch_rows && b->rows - less <= x->at.slab_rows;
}

/* Rows from .. to - 1 as a batch; `seqs` has room for all sequences. */
static Batch part_of(const Batch *b, int from, int to, int rope_width, SequenceRows *seqs) {
    Batch part = {.rows = to - from, .slot_mapping = b->slot_mapping + from, .context = b->context,
                  .cos_sin = b->cos_sin + (size_t)from * rope_width, .prompt = seqs};
    int n = 0;
    for (int i = 0; i < b->prompts; i++) {
        if (b->prompt[i].row < from || b->prompt[i].row >= to) continue;
        seqs[n] = b->prompt[i];
        seqs[n++].row -= from;
        part.prompt_rows += b->prompt[i].count;
    }
    part.prompts = n;
    part.decode = seqs + n;
    for (int i = 0; i < b->decodes; i++) {
        const int row = b->prompt_rows + b->decode[i].row;
        if (row < from || row >= to) continue;
        seqs[n] = b->decode[i];
        seqs[n++].row = row - from - part.prompt_rows;
    }
    part.decodes = n - part.prompts;
    return part;
}

/* One layer of one half: takes in what its experts gave in the last layer, attends, and sends its rows. */
static void half_layer(const Layer *l, Microbatch *h, float *kv, int lane) {
    if (h->sent) finish_exchange(h->sent->moe->exchange, h->sent, h->x);
    h->sent = NULL;
    if (exchange_failure) return;
    if (l->mla) mla(l->mla, h->x, kv, &h->batch);
    else gqa(l->gqa, h->x, kv, &h->batch);
    serve_others(l->moe);
    if (!l->moe) mlp(l->mlp, h->x, h->batch.rows);
    else if (!l->moe->exchange) moe(l->moe, h->x, h->batch.rows);
    else {
        h->sent = &l->moe->exchange->flight[lane];
        begin_exchange(l->moe->exchange, h->sent, l->moe, h->x, h->batch.rows);
    }
}

static void layers_in_two(const Stack *s, const Batch *b, float *x, float *kv, size_t layer_floats) {
    const size_t count = (size_t)(b->prompts + b->decodes);
    SequenceRows *seqs = room(SOME, 2 * sizeof(SequenceRows) * count);
    const int first = half_of(b), width = s->entry.rope_width;
    Microbatch half[2] = {{part_of(b, 0, first, width, seqs), x, NULL},
                          {part_of(b, first, b->rows, width, seqs + count), x + (size_t)first * s->norm.width, NULL}};
    Exchange *exchange = NULL;
    for (int64_t i = 0; i < s->layers && !exchange_failure; i++)
        for (int k = 0; k < 2 && !exchange_failure; k++) {
            half_layer(&s->layer[i], &half[k], kv + (size_t)i * layer_floats, k);
            if (half[k].sent) exchange = half[k].sent->moe->exchange;
        }
    for (int k = 0; k < 2 && !exchange_failure; k++)
        if (half[k].sent) finish_exchange(exchange, half[k].sent, half[k].x);
    if (exchange_failure && exchange) forget_requests(exchange);
}

#endif
