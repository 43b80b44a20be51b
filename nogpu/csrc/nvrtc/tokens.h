// Splits a preprocessed C++ source into tokens. It knows comments no more, because the preprocessor has taken them out.
// Only rewrite.cpp uses it.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace standin {

struct Token {
  std::string_view text; // an identifier, a number, a literal, or one character
  size_t begin = 0; // in the source
  bool is(std::string_view other) const { return text == other; }
  size_t end() const { return begin + text.size(); }
};

bool is_name(const Token& token);
std::vector<Token> split(std::string_view source);
// The index of the bracket that closes the one at `open`, or the number of tokens.
size_t closing(const std::vector<Token>& tokens, size_t open);

} // namespace standin
