"""The differences between families of models, as data. Free of torch, because the front door reads it. Begin
at `family`; `family_registry` beside this room finds a model's family."""
