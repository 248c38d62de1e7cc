// A saved model that cannot be used: what was wrong, where in the file, and what is supported.
#pragma once

#include "base/error.hpp"

namespace cudasched::predict::trees {

class ModelError : public Error {
 public:
  using Error::Error;
};

}  // namespace cudasched::predict::trees
