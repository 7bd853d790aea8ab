// The machine's limit for reading memory: a loop that adds what it loads, with the widest vectors
// that the compiler finds on this machine, on some threads.

#include <pthread.h>
#include <stddef.h>

typedef float Vector __attribute__((vector_size(64), aligned(64)));

typedef struct {
  const Vector* data;
  size_t count;
  Vector sum;
} Share;

static void* read_share(void* argument) {
  Share* const share = argument;
  Vector a = {0}, b = {0}, c = {0}, d = {0};
  for (size_t i = 0; i + 4 <= share->count; i += 4) {
    a += share->data[i];
    b += share->data[i + 1];
    c += share->data[i + 2];
    d += share->data[i + 3];
  }
  share->sum = (a + b) + (c + d);
  return NULL;
}

float read_loop(const void* data, size_t bytes, int threads) {
  pthread_t others[256];
  Share shares[256];
  const size_t count = bytes / sizeof(Vector) / threads;
  for (int i = 0; i < threads; ++i) {
    shares[i].data = (const Vector*)data + i * count;
    shares[i].count = count;
    if (i > 0) pthread_create(&others[i], NULL, read_share, &shares[i]);
  }
  read_share(&shares[0]);
  float sum = 0.0f;
  for (int i = 0; i < threads; ++i) {
    if (i > 0) pthread_join(others[i], NULL);
    sum += shares[i].sum[0];
  }
  return sum;
}
