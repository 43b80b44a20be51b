#include "rewrite.h"

#include <set>
#include <stdexcept>

#include "tokens.h"

namespace standin {
namespace {

const char* const kKernelMark = "__standin_global__";
const char* const kSharedMark = "__standin_shared__";

// Text in the place of the tokens from begin to end, in bytes of the source.
struct Edit {
  size_t begin, end;
  std::string text;
};

// An open brace. Names in an `opaque` one, as of a class or a function, cannot be reached from the end of the source.
struct Scope {
  std::string prefix; // of names: "outer::inner::"
  bool opaque = false;
};

struct Kernel {
  std::string name;
  std::string parameters;
};

// The index of the first token of the statement or declaration that token `at` belongs to.
size_t start_of(const std::vector<Token>& tokens, size_t at) {
  while (at > 0) {
    const Token& before = tokens[at - 1];
    if (before.is(";") || before.is("{") || before.is("}")) break;
    --at;
  }
  return at;
}

class Reader {
 public:
  explicit Reader(const std::string& source) : source_(source), tokens_(split(source)) {}

  void read() {
    for (size_t at = 0; at < tokens_.size(); ++at) {
      const Token& token = tokens_[at];
      if (token.is("{")) {
        scopes_.push_back(opened(at));
      } else if (token.is("}")) {
        if (scopes_.size() > 1) scopes_.pop_back();
      } else if (token.is(kKernelMark)) {
        edits.push_back({token.begin, token.end(), ""});
        note_kernel(at);
      } else if (token.is(kSharedMark)) {
        place_shared(at);
      }
    }
  }

  std::vector<Edit> edits; // in order, without overlaps
  std::vector<Kernel> kernels;

 private:
  std::string text(size_t first, size_t last) const {
    if (first >= last) return "";
    return source_.substr(tokens_[first].begin, tokens_[last - 1].end() - tokens_[first].begin);
  }

  Scope opened(size_t brace) const {
    const Scope& outer = scopes_.back();
    size_t at = start_of(tokens_, brace);
    if (at < brace && tokens_[at].is("inline")) ++at;
    if (at + 2 == brace && tokens_[at].is("extern") && tokens_[at + 1].text[0] == '"') return outer;
    if (outer.opaque || at >= brace || !tokens_[at].is("namespace")) return {"", true};
    std::string prefix = outer.prefix;
    for (++at; at < brace; ++at) {
      if (tokens_[at].is("__attribute__")) at = closing(tokens_, at + 1);
      else if (is_name(tokens_[at]) && !tokens_[at].is("inline")) prefix += std::string(tokens_[at].text) + "::";
    }
    return {prefix, false};
  }

  // A function that is no template goes into the table. Instances of templates do by their name expressions.
  void note_kernel(size_t mark) {
    if (scopes_.back().opaque) return;
    for (size_t at = start_of(tokens_, mark); at < mark; ++at) {
      if (tokens_[at].is("template")) return;
    }
    size_t at = mark + 1;
    while (at + 1 < tokens_.size() && !(is_name(tokens_[at]) && tokens_[at + 1].is("("))) {
      if (tokens_[at].is(";") || tokens_[at].is("{")) return;
      ++at;
    }
    while (at + 1 < tokens_.size() && tokens_[at].is("__attribute__")) { // with its arguments
      at = closing(tokens_, at + 1) + 1;
      while (at + 1 < tokens_.size() && !(is_name(tokens_[at]) && tokens_[at + 1].is("("))) ++at;
    }
    if (at + 1 >= tokens_.size()) return;
    const std::string name = scopes_.back().prefix + std::string(tokens_[at].text);
    if (seen_.insert(name).second) kernels.push_back({name, text(at + 2, closing(tokens_, at + 1))});
  }

  // `__shared__ T x[8];` is a static variable, because blocks run one after the other. `extern __shared__ T x[];` is
  // given the memory of the launch.
  void place_shared(size_t mark) {
    const size_t first = start_of(tokens_, mark);
    bool external = false;
    for (size_t at = first; at < mark; ++at) external = external || tokens_[at].is("extern");
    if (!external) {
      bool fixed = false; // `static __shared__` says it already
      for (size_t at = first; at < mark; ++at) fixed = fixed || tokens_[at].is("static");
      edits.push_back({tokens_[mark].begin, tokens_[mark].end(), fixed ? "" : "static"});
      return;
    }
    std::string type;
    size_t at = first;
    for (; at + 1 < tokens_.size() && !tokens_[at + 1].is("["); ++at) {
      const Token& token = tokens_[at];
      if (token.is("__attribute__") || token.is("alignas")) at = closing(tokens_, at + 1);
      else if (!token.is("extern") && !token.is(kSharedMark)) type += std::string(token.text) + " ";
    }
    const size_t semicolon = at + 3;
    if (semicolon >= tokens_.size() || !tokens_[semicolon].is(";") || !scopes_.back().opaque)
      throw std::invalid_argument("the stand-in takes dynamic shared memory in one form only, within a function: "
                                  "`extern __shared__ Type name[];`; got `" +
                                  text(first, std::min(semicolon + 1, tokens_.size())) + "`");
    const std::string name(tokens_[at].text);
    edits.push_back({tokens_[first].begin, tokens_[semicolon].begin,
                     type + "* const " + name + " = reinterpret_cast<" + type + "*>(::standin::dynamic_shared())"});
  }

  const std::string& source_;
  const std::vector<Token> tokens_;
  std::vector<Scope> scopes_{Scope{}};
  std::set<std::string> seen_;
};

std::string literal(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c == '\n' ? ' ' : c;
  }
  return quoted + "\"";
}

std::string table(const std::vector<Kernel>& kernels) {
  std::string text = "\n# 1 \"the table of kernels\"\nnamespace standin {\nstatic const Entry entries[] = {\n";
  for (const Kernel& kernel : kernels)
    text += "Caller<&::" + kernel.name + ">::entry(" + literal(kernel.name) + ", " + literal(kernel.parameters) +
            "),\n";
  text += "{nullptr, nullptr, nullptr, 0, nullptr, nullptr}};\n} // namespace standin\n";
  text += "extern \"C\" __attribute__((visibility(\"default\"), used)) ::standin::Module standin_module = {"
          "::standin::kModuleVersion, ::standin::entries, " +
          std::to_string(kernels.size()) + ", ";
  for (const char* variable : {"threadIdx", "blockIdx", "blockDim", "gridDim"})
    text += "reinterpret_cast<::standin::Triple*>(&::" + std::string(variable) + "), ";
  return text + "&::standin::shared, &::standin::engine};\n";
}

} // namespace

Rewritten rewrite(const std::string& source, const std::vector<std::string>& expressions) {
  Reader reader(source);
  reader.read();
  for (const std::string& expression : expressions) {
    size_t first = expression.find_first_not_of(" &:");
    if (first == std::string::npos) first = 0;
    bool known = false;
    for (const Kernel& kernel : reader.kernels) known = known || kernel.name == expression.substr(first);
    if (!known) reader.kernels.push_back({expression.substr(first), ""});
  }
  Rewritten result;
  size_t at = 0;
  for (const Edit& edit : reader.edits) {
    result.source.append(source, at, edit.begin - at);
    result.source += edit.text;
    at = edit.end;
  }
  result.source.append(source, at, std::string::npos);
  result.source += table(reader.kernels);
  for (const Kernel& kernel : reader.kernels) result.kernels.push_back(kernel.name);
  return result;
}

} // namespace standin
