"""Tokens of a language model beside a training."""
