#include "command_text.h"

namespace lockstep {
namespace {

std::string joined(const std::vector<std::string>& words, const std::string& between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::vector<std::string> all_names(const CommandText& command, bool only_with_value) {
  std::vector<std::string> names;
  for (const OptionText& option : command.options)
    if (!only_with_value || !option.value.empty()) names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

/// The completion of `run`, where a program with its own arguments follows the options.
constexpr const char* kBashProgram = R"(    local at=2 named=
    while ((at < COMP_CWORD)); do
      case ${COMP_WORDS[at]} in
        --) named=yes; ((at += 1)); break ;;
        -*)
          if [[ " $valued " != *" ${COMP_WORDS[at]} "* ]]; then ((at += 1))
          elif [[ ${COMP_WORDS[at + 1]} == = ]]; then ((at += 3))
          else ((at += 2)); fi ;;
        *) break ;;
      esac
    done
    if ((at < COMP_CWORD)); then
      if declare -F _command_offset >/dev/null; then _command_offset "$at"; else _lockstep_paths -f "$word"; fi
      return
    fi
    if ((at == COMP_CWORD)) && [[ $named || $word != -* ]]; then
      _lockstep_paths -c "$word"
      _lockstep_paths -f "$word"
      return
    fi
)";

constexpr const char* kBashStart = R"(# Completes lockstep in bash. `lockstep completion bash` prints it.
_lockstep_paths() {
  local name
  compopt -o filenames 2>/dev/null
  while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen "$1" -- "$2")
}

_lockstep() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} options= valued= argument= words=
  COMPREPLY=()
  if [[ $word == = ]]; then word=
  elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD - 2]}; fi
)";

std::string bash_values(const std::vector<CommandText>& commands) {
  std::string cases;
  for (const CommandText& command : commands)
    for (const OptionText& option : command.options) {
      if (option.value.empty()) continue;
      std::string patterns;
      for (const std::string& name : option.names)
        patterns += (patterns.empty() ? "'" : " | '") + command.name + " " + name + "'";
      cases += "    " + patterns + ") ";
      if (option.takes_folder())
        cases += "_lockstep_paths -d \"$word\"; ";
      else if (option.takes_file() || option.value == "PATH")
        cases += "_lockstep_paths -f \"$word\"; ";
      else if (!option.words.empty())
        cases += "COMPREPLY=($(compgen -W '" + joined(option.words, " ") + "' -- \"$word\")); ";
      cases += "return ;;\n";
    }
  return "  case \"${COMP_WORDS[1]} $before\" in\n" + cases + "  esac\n";
}

std::string first_sentence(const std::string& text) { return text.substr(0, text.find(". ")); }

/// Text for '...' in zsh, within [...] of _arguments.
std::string zsh_text(const std::string& text) {
  std::string result;
  for (const char letter : first_sentence(text)) {
    if (letter == '\'')
      result += "'\\''";
    else if (letter == '[' || letter == ']' || letter == ':' || letter == '\\')
      result += std::string("\\") + letter;
    else
      result += letter;
  }
  return result;
}

std::string zsh_value(const OptionText& option) {
  if (option.value.empty()) return "";
  std::string action = " ";
  if (option.takes_folder())
    action = "_files -/";
  else if (option.takes_file() || option.value == "PATH")
    action = "_files";
  else if (!option.words.empty())
    action = "(" + joined(option.words, " ") + ")";
  return ":" + zsh_text(option.value) + ":" + action;
}

std::string zsh_options(const CommandText& command) {
  std::string specs;
  for (const OptionText& option : command.options) {
    const bool repeats = option.value == "NAME=VALUE";
    for (const std::string& name : option.names) {
      const std::string excluded = repeats ? "*" : "(" + joined(option.names, " ") + ")";
      const std::string equals = !option.value.empty() && name.starts_with("--") ? "=" : "";
      specs += " \\\n        '" + excluded + name + equals + "[" + zsh_text(option.description) + "]" +
               zsh_value(option) + "'";
    }
  }
  for (const OptionText& argument : command.arguments) specs += " \\\n        '" + zsh_value(argument) + "'";
  return specs;
}

/// Whether the program of `lockstep run` is still missing, and the completion once it is there.
constexpr const char* kFishProgram = R"(
# The place of the program among the words before the cursor; fails where it is still to come.
function __lockstep_program
    set -l words (commandline -opc)
    set -l at 3
    while test $at -le (count $words)
        switch $words[$at]
            case --
                test $at -lt (count $words); and echo (math $at + 1); and return
                return 1
            case '-*'
                contains -- $words[$at] $__lockstep_valued; and set at (math $at + 1)
            case '*'
                echo $at
                return
        end
        set at (math $at + 1)
    end
    return 1
end

function __lockstep_arguments
    set -l words (commandline -opc)
    set -l at (__lockstep_program); or return
    complete -C (string join ' ' -- (string escape -- $words[$at..-1]) (commandline -ct))
end

function __lockstep_is
    set -l words (commandline -opc)
    test (count $words) -gt 1; and test $words[2] = $argv[1]; or return 1
    test $words[2] != run; or not __lockstep_program >/dev/null
end

function __lockstep_has_program
    set -l words (commandline -opc)
    test (count $words) -gt 1; and test $words[2] = run; and __lockstep_program >/dev/null
end

complete -c lockstep -f
complete -c lockstep -n __lockstep_has_program -a '(__lockstep_arguments)'
complete -c lockstep -n '__lockstep_is run' -a '(__fish_complete_command)' -d program
complete -c lockstep -n '__lockstep_is run' -F
)";

/// Text for '...' in fish.
std::string fish_text(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '\'' || letter == '\\') result += '\\';
    result += letter;
  }
  return result;
}

/// The possible values of an option or argument: words, folders, files, or unknown ones.
std::string fish_values(const OptionText& option) {
  if (!option.words.empty()) return " -f -a '" + joined(option.words, " ") + "'";
  if (option.takes_folder()) return " -f -a '(__fish_complete_directories)'";
  return option.takes_file() || option.value == "PATH" ? " -F" : " -f";
}

std::string fish_options(const CommandText& command) {
  std::string lines;
  const std::string start = "complete -c lockstep -n '__lockstep_is " + command.name + "'";
  for (const OptionText& option : command.options) {
    lines += start;
    for (const std::string& name : option.names)
      lines += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (!option.value.empty()) lines += " -r" + fish_values(option);
    lines += " -d '" + fish_text(first_sentence(option.description)) + "'\n";
  }
  for (const OptionText& argument : command.arguments) lines += start + fish_values(argument) + "\n";
  return lines;
}

}  // namespace

std::string bash_completion(const std::vector<CommandText>& commands) {
  std::vector<std::string> names;
  std::string cases;
  for (const CommandText& command : commands) {
    names.push_back(command.name);
    cases += "    " + command.name + ")\n      options='" + joined(all_names(command, false), " ") +
             "'\n      valued='" + joined(all_names(command, true), " ") + "'\n";
    if (!command.arguments.empty() && command.arguments[0].takes_folder()) cases += "      argument=-d\n";
    if (!command.arguments.empty() && command.arguments[0].takes_file()) cases += "      argument=-f\n";
    if (!command.arguments.empty() && !command.arguments[0].words.empty())
      cases += "      words='" + joined(command.arguments[0].words, " ") + "'\n";
    cases += "      ;;\n";
  }
  return std::string(kBashStart) + "  if ((COMP_CWORD == 1)); then\n    COMPREPLY=($(compgen -W '" +
         joined(names, " ") + " --help --version' -- \"$word\"))\n    return\n  fi\n  case ${COMP_WORDS[1]} in\n" +
         cases + "  esac\n" + "  if [[ ${COMP_WORDS[1]} == run ]]; then\n" + kBashProgram + "  fi\n" +
         bash_values(commands) +
         "  if [[ $word == -* ]]; then COMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n"
         "  elif [[ $words ]]; then COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
         "  elif [[ $argument ]]; then _lockstep_paths $argument \"$word\"; fi\n}\ncomplete -F _lockstep lockstep\n";
}

std::string zsh_completion(const std::vector<CommandText>& commands) {
  std::string names, cases;
  for (const CommandText& command : commands) {
    names += "    '" + command.name + ":" + zsh_text(command.description) + "'\n";
    cases += "    " + command.name + ")\n      _arguments -S" + zsh_options(command);
    if (command.name == "run")
      cases += " \\\n        '(-):program:_lockstep_program' \\\n        '*::arguments:_normal'";
    cases += "\n      ;;\n";
  }
  return "#compdef lockstep\n# Completes lockstep in zsh. `lockstep completion zsh` prints it.\n"
         "_lockstep_program() {\n  _alternative 'commands:command:_command_names -e' 'files:file:_files'\n}\n\n"
         "_lockstep() {\n  local curcontext=\"$curcontext\" state line\n  local -a commands\n  commands=(\n" +
         names +
         "  )\n  _arguments -C '(- *)'{-h,--help}'[the commands]' '(- *)--version[the version, and how it was built]' "
         "\\\n    ':command:->command' '*::argument:->argument' && return\n"
         "  if [[ $state == command ]]; then\n    _describe command commands\n    return\n  fi\n  case $words[1] in\n" +
         cases +
         "  esac\n}\n\nif [[ $funcstack[1] == _lockstep ]]; then _lockstep \"$@\"; else compdef _lockstep lockstep; "
         "fi\n";
}

std::string fish_completion(const std::vector<CommandText>& commands) {
  std::string script = "# Completes lockstep in fish. `lockstep completion fish` prints it.\nset -g __lockstep_valued";
  for (const CommandText& command : commands)
    if (command.name == "run") script += " " + joined(all_names(command, true), " ");
  script += std::string("\n") + kFishProgram;
  for (const CommandText& command : commands)
    script += "complete -c lockstep -n 'test (count (commandline -opc)) -eq 1' -a " + command.name + " -d '" +
              fish_text(first_sentence(command.description)) + "'\n";
  script +=
      "complete -c lockstep -n 'test (count (commandline -opc)) -eq 1' -s h -l help -d 'The commands'\n"
      "complete -c lockstep -n 'test (count (commandline -opc)) -eq 1' -l version -d "
      "'The version, and how it was built'\n";
  for (const CommandText& command : commands) script += fish_options(command);
  return script;
}

}  // namespace lockstep
