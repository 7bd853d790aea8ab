// What a tensor says of itself, asked once: every question is a call into torch, and a launch asks many.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace torch_pagedkv {

// It answers like a tensor, and must not outlive it.
class TensorView {
 public:
  TensorView(const torch::stable::Tensor& tensor) : is_defined_(tensor.defined()) {
    if (!is_defined_) return;
    is_cuda_ = tensor.is_cuda();
    if (!is_cuda_) return;  // refused before anything else is asked
    const auto sizes = tensor.sizes();
    dim_ = static_cast<int64_t>(sizes.size());
    sizes_ = sizes.data();
    strides_ = tensor.strides().data();
    dtype_ = tensor.scalar_type();
    element_size_ = tensor.element_size();
    device_ = tensor.get_device_index();
    data_ = tensor.data_ptr();
  }

  bool defined() const { return is_defined_; }
  bool is_cuda() const { return is_cuda_; }
  int32_t get_device_index() const { return device_; }
  torch::headeronly::ScalarType scalar_type() const { return dtype_; }
  size_t element_size() const { return element_size_; }
  void* data_ptr() const { return data_; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  torch::headeronly::IntHeaderOnlyArrayRef sizes() const { return {sizes_, static_cast<size_t>(dim_)}; }

  int64_t numel() const {
    int64_t product = 1;
    for (int64_t dim = 0; dim < dim_; ++dim) product *= sizes_[dim];
    return product;
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t dim = dim_ - 1; dim >= 0; --dim) {
      if (sizes_[dim] != 1 && strides_[dim] != expected && numel() != 0) return false;
      expected *= sizes_[dim];
    }
    return true;
  }

 private:
  bool is_defined_, is_cuda_ = false;
  torch::headeronly::ScalarType dtype_ = torch::headeronly::ScalarType::Undefined;
  int32_t device_ = -1;
  size_t element_size_ = 0;
  void* data_ = nullptr;
  int64_t dim_ = 0;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
};

}  // namespace torch_pagedkv
