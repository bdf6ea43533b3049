/* A prompt that is kept whole: its pages are copied into resident blocks.
 *
 * Contract: vllm_h2o/attention/ops::adopt.
 */

static void h2o_adopt_page(const h2o_adopt_args *a, int64_t block) {
    const char *source = (char *)a->cache + a->source_blocks[block] * a->page_stride;
    char *target = (char *)a->cache + a->target_blocks[block] * a->page_stride;
    float *scores = (float *)(target + a->state_offset);
    int32_t *births = (int32_t *)(scores + a->num_kv_heads * a->block_size);
    memcpy(target, source, a->state_offset);
    memset(scores, 0, a->num_kv_heads * a->block_size * sizeof(float));
    for (int64_t head = 0; head < a->num_kv_heads; ++head)
        for (int64_t i = 0; i < a->block_size; ++i)
            births[head * a->block_size + i] = (int32_t)(block * a->block_size + i);
}

void h2o_adopt(const h2o_adopt_args *a) {
    /* A team of threads costs as much as a few pages. */
#pragma omp parallel for num_threads(a->num_threads) if (a->num_blocks > 4)
    for (int64_t block = 0; block < a->num_blocks; ++block) h2o_adopt_page(a, block);
}
