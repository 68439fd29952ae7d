"""transformers' GlmMoeDsaForCausalLM on glm5sdk's ops: `accelerate(model)`, and `restore(model)` takes it back.

```python
from glm5sdk.integrations.transformers import accelerate

model = GlmMoeDsaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
accelerate(model)          # for good, or `with accelerate(model): ...`
model.generate(**inputs)   # as before
```

Modules, parameters, state dict and saved checkpoints stay what they are; only what computes is another.
"""

from __future__ import annotations

from glm5sdk.integrations.transformers.accelerate import Acceleration, accelerate, restore

__all__ = ["Acceleration", "accelerate", "restore"]
