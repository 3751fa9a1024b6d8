"""A prefill group: chunks of prompts through stages that each hold some of the layers."""
