// The table of an instruction set's kernels, from the bodies before it.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

template <class Units>
void attend_to(
    const Attention& attention,
    const AttentionItem& item,
    const AttentionItem* next,
    char* scratch) {
  if (!item.has_few_rows(attention)) {
    return ManyRows<Units>(attention, item, Carver(scratch)).run();
  }
  if (attention.goes_by_token()) {
    return FewRows<Units, true>(attention, item, Carver(scratch)).run(next);
  }
  FewRows<Units, false>(attention, item, Carver(scratch)).run(next);
}

template <class Element>
void attend_to_elements(
    const Attention& attention,
    const AttentionItem& item,
    const AttentionItem* next,
    char* scratch) {
#ifdef TORCH_PAGEDKV_AVX512_BF16
  if constexpr (Element::kBytes < 4 && !std::is_same_v<Element, Float16>) {
    if (attention.query.dtype == ScalarType::BFloat16) {
      return attend_to<Bfloat16Units<Element>>(attention, item, next, scratch);
    }
  }
#endif
  attend_to<Float32Units<Element>>(attention, item, next, scratch);
}

void attend(
    const Attention& attention,
    const AttentionItem& item,
    const AttentionItem* next,
    char* scratch) {
  switch (attention.key_pool.dtype) {
    case ScalarType::BFloat16:
      return attend_to_elements<Bfloat16>(attention, item, next, scratch);
    case ScalarType::Half:
      return attend_to_elements<Float16>(attention, item, next, scratch);
    case ScalarType::Float8_e4m3fn:
      return attend_to_elements<Fp8<Float8E4M3FN>>(attention, item, next, scratch);
    case ScalarType::Float8_e5m2:
      return attend_to_elements<Fp8<Float8E5M2>>(attention, item, next, scratch);
    default:
      return attend_to_elements<Float32>(attention, item, next, scratch);
  }
}
