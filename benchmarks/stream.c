/* Reads memory and does next to nothing with it: the bandwidth of this machine. */
#include <stdint.h>
#include <string.h>

typedef uint64_t vec __attribute__((vector_size(64)));

/* Xor of `count` cache lines, so that no load can be left out. */
uint64_t h2o_stream(const char *from, int64_t count, int64_t num_threads) {
    uint64_t result = 0;
#pragma omp parallel for num_threads(num_threads) reduction(^ : result) schedule(static)
    for (int64_t part = 0; part < num_threads; ++part) {
        const int64_t first = count * part / num_threads;
        const int64_t last = count * (part + 1) / num_threads;
        vec acc[4] = {{0}};
        for (int64_t i = first; i + 4 <= last; i += 4)
            for (int j = 0; j < 4; ++j) {
                vec line;
                memcpy(&line, from + (i + j) * 64, 64);
                acc[j] ^= line;
            }
        acc[0] ^= acc[1] ^ acc[2] ^ acc[3];
        for (int j = 0; j < 8; ++j) result ^= acc[0][j];
    }
    return result;
}
