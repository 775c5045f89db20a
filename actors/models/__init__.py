"""Model, tokenizer, attention over packed rows and logprobs, as trainer and engines load them."""
