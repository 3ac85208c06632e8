# cmake -DFROM=<text> -DTO=<source> -DNAME=<name> -P embed_text.cmake: a file as the constant lockstep::<name> of a program.
file(READ ${FROM} text)
file(WRITE ${TO} "// Made of ${FROM}.
namespace lockstep {
extern const char* const ${NAME};
const char* const ${NAME} = R\"~page~(${text})~page~\";
}  // namespace lockstep
")
