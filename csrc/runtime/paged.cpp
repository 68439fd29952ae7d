#include "glm5/paged.h"

#include <algorithm>
#include <cstring>

#include "glm5/scratch.h"

namespace glm5 {
namespace {

using ll = long long;

template <class T>
void check_all(const char* op, const char* name, const T* values, int64_t n, int64_t low, int64_t high) {
  for (int64_t i = 0; i < n; ++i) {
    if (values[i] < low || values[i] > high) {
      fail("%s: %s[%lld] is %lld, needs %lld to %lld", op, name, ll{i}, static_cast<ll>(values[i]), ll{low}, ll{high});
    }
  }
}

void check_page(const char* op, const PageTable& table, int64_t request, int64_t logical) {
  const int32_t page = table.table[request * table.pages_each + logical];
  if (page < 0 || page >= table.pages) {
    fail("%s: block_table[%lld, %lld] is %d, needs 0 to %lld: a token reads this page", op, ll{request}, ll{logical},
         page, ll{table.pages - 1});
  }
}

}  // namespace

void check_range(const char* op, const char* name, const int32_t* values, int64_t n, int64_t low, int64_t high) {
  check_all(op, name, values, n, low, high);
}
void check_range(const char* op, const char* name, const int64_t* values, int64_t n, int64_t low, int64_t high) {
  check_all(op, name, values, n, low, high);
}

void check_slots(const char* op, const int64_t* slots, int64_t n, int64_t pool) {
  check_range(op, "slots", slots, n, -1, pool - 1);
  // Steps mostly write ascending slots, which need no memory of what came before.
  int64_t last = -1, i = 0;
  for (; i < n && (slots[i] < 0 || slots[i] > last); ++i) last = std::max(last, slots[i]);
  if (i == n) return;
  Scratch scratch;
  int64_t* sorted = scratch.take<int64_t>(n);
  std::copy(slots, slots + n, sorted);
  std::sort(sorted, sorted + n);
  for (i = 1; i < n; ++i) {
    if (sorted[i] >= 0 && sorted[i] == sorted[i - 1]) {
      fail("%s: slot %lld is named twice, needs distinct slots or -1", op, ll{sorted[i]});
    }
  }
}

bool is_byte_format(const char* op, const char* format, const char* bytes) {
  if (std::strcmp(format, "plain") == 0) return false;
  if (std::strcmp(format, bytes) != 0) fail("%s: format is \"%s\", needs \"plain\" or \"%s\"", op, format, bytes);
  return true;
}

PageTable::PageTable(const TensorView& block_table, int64_t pages_, int64_t page_size_)
    : table(block_table.data<int32_t>()),
      requests(block_table.dim(0)),
      pages_each(block_table.dim(1)),
      pages(pages_),
      page_size(page_size_) {}

int64_t check_lengths(const char* op, const PageTable& table, const TensorView& request_ids, const TensorView& kv_lens,
                      int64_t max_kv_len) {
  const int32_t *requests = request_ids.data<int32_t>(), *lengths = kv_lens.data<int32_t>();
  const int64_t rows = request_ids.numel(), most = std::min(table.capacity(), max_kv_len);
  check_range(op, "request_ids", requests, rows, -1, table.requests - 1);
  int64_t longest = 0, checked_pages = 0, checked_request = -1;
  for (int64_t t = 0; t < rows; ++t) {
    if (requests[t] < 0) continue;
    if (lengths[t] < 0 || lengths[t] > most) {
      fail("%s: kv_lens[%lld] is %d, needs 0 to %lld (%s)", op, ll{t}, lengths[t], ll{most},
           most == table.capacity() ? "the tokens its pages hold" : "max_kv_len");
    }
    longest = std::max<int64_t>(longest, lengths[t]);
    // Neighbouring rows mostly share a request: its pages are looked at once.
    if (requests[t] != checked_request) checked_request = requests[t], checked_pages = 0;
    for (; checked_pages * table.page_size < lengths[t]; ++checked_pages) {
      check_page(op, table, checked_request, checked_pages);
    }
  }
  return longest;
}

void check_selections(const char* op, const PageTable& table, const TensorView& request_ids,
                      const TensorView& indices) {
  const int32_t *requests = request_ids.data<int32_t>(), *index = indices.data<int32_t>();
  const int64_t rows = request_ids.numel(), groups = indices.dim(1), k = indices.dim(2);
  check_range(op, "request_ids", requests, rows, -1, table.requests - 1);
  for (int64_t t = 0; t < rows; ++t) {
    if (requests[t] < 0) continue;
    for (int64_t g = 0; g < groups; ++g) {
      const int32_t* row = index + (t * groups + g) * k;
      int64_t page_end = 0;  // positions ascend: a page is looked up when they leave the last one
      for (int64_t j = 0; j < k; ++j) {
        if (row[j] < -1 || row[j] >= table.capacity()) {
          fail("%s: indices[%lld, %lld, %lld] is %d, needs -1 to %lld", op, ll{t}, ll{g}, ll{j}, row[j],
               ll{table.capacity() - 1});
        }
        if (j > 0 && row[j] != -1 && (row[j - 1] == -1 || row[j] <= row[j - 1])) {
          fail("%s: indices[%lld, %lld, %lld] is %d after %d, needs strictly ascending positions, then -1", op, ll{t},
               ll{g}, ll{j}, row[j], row[j - 1]);
        }
        if (row[j] >= page_end) {
          const int64_t logical = row[j] / table.page_size;
          check_page(op, table, requests[t], logical);
          page_end = (logical + 1) * table.page_size;
        }
      }
    }
  }
}

}  // namespace glm5
