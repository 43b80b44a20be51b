#include "tokens.h"

#include <cctype>
#include <string>

namespace standin {
namespace {

bool letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }
bool digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }

// The end of a literal in quotes that begins at `at`.
size_t quoted(std::string_view source, size_t at) {
  const char quote = source[at++];
  while (at < source.size() && source[at] != quote) at += source[at] == '\\' ? 2 : 1;
  return at + 1;
}

// The end of R"tag(...)tag", whose quote is at `at`.
size_t raw(std::string_view source, size_t at) {
  const size_t open = source.find('(', at);
  if (open == std::string_view::npos) return source.size();
  const std::string close = ")" + std::string(source.substr(at + 1, open - at - 1)) + "\"";
  const size_t found = source.find(close, open);
  return found == std::string_view::npos ? source.size() : found + close.size();
}

size_t end_of(std::string_view source, size_t at) {
  const char first = source[at];
  if (first == '"' || first == '\'') return quoted(source, at);
  size_t end = at + 1;
  if (letter(first)) {
    while (end < source.size() && (letter(source[end]) || digit(source[end]))) ++end;
    const bool is_raw = source[end - 1] == 'R' && end - at <= 3 && end < source.size() && source[end] == '"';
    return is_raw ? raw(source, end) : end;
  }
  if (digit(first)) {
    // 1'000, 0x1p+3, 1e-5f
    while (end < source.size()) {
      const char c = source[end], before = source[end - 1];
      const bool sign = (c == '+' || c == '-') && (before == 'e' || before == 'E' || before == 'p' || before == 'P');
      if (!letter(c) && !digit(c) && c != '.' && c != '\'' && !sign) break;
      ++end;
    }
  }
  return end;
}

} // namespace

bool is_name(const Token& token) { return !token.text.empty() && letter(token.text[0]) && token.text.back() != '"'; }

std::vector<Token> split(std::string_view source) {
  std::vector<Token> tokens;
  bool line_is_new = true;
  for (size_t at = 0; at < source.size();) {
    const char c = source[at];
    if (c == '\n') line_is_new = true;
    if (std::isspace(static_cast<unsigned char>(c))) {
      ++at;
    } else if (c == '#' && line_is_new) {
      at = source.find('\n', at); // a line marker or a pragma
      if (at == std::string_view::npos) break;
    } else {
      line_is_new = false;
      const size_t end = std::min(end_of(source, at), source.size());
      tokens.push_back({source.substr(at, end - at), at});
      at = end;
    }
  }
  return tokens;
}

size_t closing(const std::vector<Token>& tokens, size_t open) {
  size_t depth = 0;
  for (size_t at = open; at < tokens.size(); ++at) {
    const char c = tokens[at].text[0];
    if (tokens[at].text.size() != 1) continue;
    if (c == '(' || c == '[' || c == '{') ++depth;
    if ((c == ')' || c == ']' || c == '}') && --depth == 0) return at;
  }
  return tokens.size();
}

} // namespace standin
