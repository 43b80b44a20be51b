"""One call of any form: its options, its four stages, and what surrounds them."""
