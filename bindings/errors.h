// Native errors as the classes of glm5sdk.core.errors.
#pragma once

namespace glm5::python {

// From now on this module raises glm5sdk's ContractError where native code throws one.
void translate_contract_errors();

}  // namespace glm5::python
