#include "sim/cuda/guarded.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <string>

#include "sim/cuda/settings.h"

namespace glm5::sim {
namespace {

constexpr size_t kPage = 4096, kAlignment = 16;
constexpr unsigned char kSentinel = 0xa5;

std::mutex mutex;
std::vector<const Guarded*> live;

const unsigned char* bytes_of(const TensorView& tensor) {
  const DLTensor& raw = tensor.raw();
  return static_cast<const unsigned char*>(raw.data) + raw.byte_offset;
}

}  // namespace

Guarded::Guarded(const TensorView& tensor, const char* name) : original_(tensor), name_(name) {
  bytes_ = static_cast<size_t>(tensor.numel()) * ((tensor.raw().dtype.bits + 7u) / 8u);
  room_bytes_ = (bytes_ + kPage - 1) / kPage * kPage;
  void* mapped = mmap(nullptr, room_bytes_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<unsigned char*>(mapped);
  room_ = mapping_ + kPage;
  data_ = room_;
  if (bytes_ != 0) {
    mprotect(room_, room_bytes_, PROT_READ | PROT_WRITE);
    std::memset(room_, kSentinel, room_bytes_);
    const bool below = (current_settings().seed & 1) != 0;
    if (!below) data_ += (room_bytes_ - bytes_) / kAlignment * kAlignment;
    std::memcpy(data_, bytes_of(tensor), bytes_);
  }
  DLTensor raw = tensor.raw();
  raw.data = data_;
  raw.byte_offset = 0;
  view_ = TensorView(raw, false);
  const std::lock_guard<std::mutex> lock(mutex);
  live.push_back(this);
}

Guarded::~Guarded() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    live.erase(std::find(live.begin(), live.end(), this));
  }
  munmap(mapping_, room_bytes_ + 2 * kPage);
}

void Guarded::copy_back() {
  if (bytes_ == 0) return;
  for (const unsigned char* p = room_; p < room_ + room_bytes_; ++p) {
    if (p == data_) p += bytes_;
    if (p == room_ + room_bytes_) break;
    if (*p == kSentinel) continue;
    char where[256];
    describe(where, sizeof where, p);
    throw KernelFault(std::string("a kernel wrote") + where);
  }
  const unsigned char* to = bytes_of(original_);
  if (std::memcmp(to, data_, bytes_) != 0) std::memcpy(const_cast<unsigned char*>(to), data_, bytes_);
}

void Guarded::describe(char* to, size_t size, const void* address) {
  to[0] = '\0';
  const auto* p = static_cast<const unsigned char*>(address);
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Guarded* g : live) {
    if (p < g->mapping_ || p >= g->mapping_ + g->room_bytes_ + 2 * kPage) continue;
    if (p < g->data_) {
      std::snprintf(to, size, ", %td bytes before the start of `%s`", g->data_ - p, g->name_);
    } else {
      std::snprintf(to, size, ", %td bytes behind the end of `%s`", p - (g->data_ + g->bytes_) + 1, g->name_);
    }
    return;
  }
  if (reinterpret_cast<uintptr_t>(address) < kPage) std::snprintf(to, size, " (a null pointer)");
}

}  // namespace glm5::sim
