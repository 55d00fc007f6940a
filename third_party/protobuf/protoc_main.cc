// protoc with C++ as the only language.

#include "google/protobuf/compiler/command_line_interface.h"
#include "google/protobuf/compiler/cpp/generator.h"

int main(int argc, char* argv[]) {
  google::protobuf::compiler::CommandLineInterface command_line;
  google::protobuf::compiler::cpp::CppGenerator cpp;
  command_line.RegisterGenerator("--cpp_out", "--cpp_opt", &cpp, "Writes C++ headers and sources.");
  return command_line.Run(argc, argv);
}
