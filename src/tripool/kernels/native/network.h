/* A network as Python describes it: `kernels/cpu8/library.py` has the same structures. */
#ifndef TRIPOOL_NETWORK_H
#define TRIPOOL_NETWORK_H

#include "exchange.h"
#include "latent.h"
#include "layers.h"

typedef struct {
    const Mla *mla; /* one of the two */
    const Gqa *gqa;
    const Moe *moe; /* one of the two */
    const Mlp *mlp;
} Layer;

/* Embedding and rotary tables. */
typedef struct {
    const float *embed; /* [vocab, hidden] */
    const float *cos_sin; /* [positions, rope_width] */
    int32_t width, rope_width, positions;
} Entry;

typedef struct Stack {
    Entry entry;
    int64_t layers;
    const Layer *layer;
    Norm norm;
    Weight head;
    struct Prompts *prompts; /* with the ranks that share long prompts; NULL: none */
} Stack;

#endif
