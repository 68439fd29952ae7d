"""`python -m glm5sdk.cli`, where the console script is not on the path."""

from __future__ import annotations

from glm5sdk.cli import main

main()
