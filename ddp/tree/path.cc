#include "ddp/tree/path.h"

namespace ddp {

std::string TreePath::Text(std::string_view root) const {
  if (parent_ == nullptr) return std::string(root);
  std::string text = parent_->Text(root);
  switch (kind_) {
    case Kind::kRoot:
      break;
    case Kind::kName:
      text.append(".").append(text_);
      break;
    case Kind::kIndex:
      text.append("[").append(std::to_string(number_)).append("]");
      break;
    case Kind::kTextKey:
      text.append("[\"").append(text_).append("\"]");
      break;
    case Kind::kOtherKey:
      text.append("[…]");
      break;
  }
  return text;
}

}  // namespace ddp
