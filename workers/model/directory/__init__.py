"""What a model's directory says, read and checked without torch, because the front door reads it too.

Begin at `store.py`: it turns the name of a model into a directory. `model_config.py` reads the decoder's
shape, `tokenizer_files.py` the tokenizer's, `headers.py` checks the weights, `digest.py` names the model.
"""
